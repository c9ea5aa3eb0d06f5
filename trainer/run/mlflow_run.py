"""MLflow: the only module that uses mlflow, on a thread of its own."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from bigbatch.comm.rendezvous.environ import mlflow_settings
from bigbatch.errors import first_line
from bigbatch.trainer.run.background_logger import BackgroundLogger, Say
from bigbatch.trainer.run.folder import RunDir

MOST_PARAMS = 100
"""Parameters of one request, by MLflow's limits."""


def log_to_mlflow(rundir: RunDir, *, stated: Mapping[str, Any], from_step: int, say: Say) -> BackgroundLogger:
    """Send figures to a run of MLflow: at MLFLOW_TRACKING_URI, else in RUN/mlflow; a resumed run continues it."""
    return BackgroundLogger(
        "mlflow", lambda tell: _MlflowRun(rundir, stated=stated, is_new=from_step == 0, tell=tell), say=say
    )


class _MlflowRun:
    """One run in MLflow, whose id the run folder keeps."""

    def __init__(self, rundir: RunDir, *, stated: Mapping[str, Any], is_new: bool, tell: Say) -> None:
        store = rundir.path / "mlflow"
        settings = mlflow_settings(default_store=store)
        if settings["tracking_uri"] == store.resolve().as_uri():
            rundir.make_folder(store)
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except Exception as error:  # its dependencies may raise anything at import
            raise ImportError(f"it cannot be imported, {first_line(error)}: pip install 'bigbatch[mlflow]'") from error
        self._metric = Metric
        self._client = client = MlflowClient(tracking_uri=settings["tracking_uri"])
        name = settings["experiment_name"]
        kept = rundir.mlflow_id.read_text().strip() if not is_new and rundir.mlflow_id.is_file() else ""
        if kept:
            client.update_run(kept, status="RUNNING")
        else:
            found = client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else client.create_experiment(name)
            kept = client.create_run(experiment, run_name=settings.get("run_name", rundir.path.name)).info.run_id
            rundir.write_text(rundir.mlflow_id, f"{kept}\n")
            params = [Param(key, str(value)) for key, value in _flat(stated)]
            for first in range(0, len(params), MOST_PARAMS):
                client.log_batch(kept, params=params[first : first + MOST_PARAMS])
        self._run = kept
        tell(f"mlflow: run {kept} of experiment {name} at {settings['tracking_uri']}")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, float(value), now, step) for name, value in figures.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def finish(self) -> None:
        self._client.set_terminated(self._run)


def _flat(stated: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield section.key and value of each key."""
    for key, value in stated.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
