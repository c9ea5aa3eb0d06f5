"""A run in MLflow."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from bigbatch.errors import first_line, pip_install
from bigbatch.files import read_plain
from bigbatch.trainer.config.file import flatten
from bigbatch.trainer.config.kinds import flat_options
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.loggers.names import name_of
from bigbatch.user_settings import mlflow_settings

MAX_PARAMS = 100
"""MLflow's limit of parameters in one request."""


class MlflowRun:
    """A run in MLflow, at MLFLOW_TRACKING_URI, else in RUN/mlflow or its sweep's mlflow; a resumed run continues it."""

    def __init__(
        self, rundir: RunDir, tell: Callable[[str], None], *, stated: Mapping[str, Any], from_step: int
    ) -> None:
        named = name_of(rundir)
        store = (named.folder or rundir.path) / "mlflow"
        settings = mlflow_settings(default_store=store, experiment=named.sweep or "bigbatch")
        if settings["tracking_uri"] == store.resolve().as_uri():
            RunDir(store.parent).make_folder(store)
        try:
            from mlflow import MlflowClient
            from mlflow.entities import Metric, Param
        except Exception as error:  # its dependencies may raise anything at import
            raise ImportError(f"it cannot be imported, {first_line(error)}: {pip_install('mlflow')}") from error
        self._metric = Metric
        self._client = client = MlflowClient(tracking_uri=settings["tracking_uri"])
        name = settings["experiment_name"]
        kept = read_plain(rundir.mlflow_id).decode().strip() if from_step and rundir.mlflow_id.is_file() else ""
        if kept:
            client.update_run(kept, status="RUNNING")
        else:
            run_name = settings.get("run_name", named.name)
            kept = client.create_run(_experiment_id(client, name), run_name=run_name).info.run_id
            rundir.write_text(rundir.mlflow_id, f"{kept}\n")
            params = [Param(key, str(value)) for key, value in flat_options(flatten(stated)).items()]
            for first in range(0, len(params), MAX_PARAMS):
                client.log_batch(kept, params=params[first : first + MAX_PARAMS])
        self._run = kept
        tell(f"mlflow: run {kept} of experiment {name} at {settings['tracking_uri']}")

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, float(value), now, step) for name, value in figures.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def finish(self) -> None:
        self._client.set_terminated(self._run)


def _experiment_id(client: Any, name: str) -> Any:
    if found := client.get_experiment_by_name(name):
        return found.experiment_id
    try:
        return client.create_experiment(name)
    except Exception:  # another point of the sweep has created it meanwhile
        if found := client.get_experiment_by_name(name):
            return found.experiment_id
        raise
