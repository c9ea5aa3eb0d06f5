"""Loggers for the numbers of metrics.jsonl: TensorBoard, Weights & Biases and MLflow. Only this module uses them."""

import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

from bigbatch.errors import first_line
from bigbatch.numbers import is_number
from bigbatch.trainer.config.file import flatten
from bigbatch.trainer.config.kinds import flat_options
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.run.cost import ELAPSED
from bigbatch.trainer.run.folder import RunDir
from bigbatch.user_settings import mlflow_settings, wandb_settings

CLOSE_SECONDS = 60.0
"""Limit of the wait for unsent data at the end of a run."""

Say = Callable[[str], None]


class BackgroundLogger:
    """Passes figures to a thread that opens a session and sends them; says once if it fails, and then ignores them.

    A logger must not end a run. The thread's messages are printed by the next call, on the run's main thread, which
    owns the terminal.
    """

    def __init__(self, name: str, open_session: Callable[[Say], Any], *, say: Say) -> None:
        """Start the thread. open_session: takes a function for messages; returns an object with log and finish."""
        self._name, self._open, self.say = name, open_session, say
        """say prints a line; after a rank failure the run that takes over the logger replaces it."""
        self._news: list[str] = []
        self._error = ""
        self._has_failed = False
        self._figures: Queue[tuple[int, dict[str, float]] | None] = Queue()
        self._thread = Thread(target=self._speak, name=name, daemon=True)
        self._thread.start()

    def _speak(self) -> None:
        try:
            session = self._open(self._news.append)
            while (figures := self._figures.get()) is not None:
                session.log(*figures)
            session.finish()
        except BaseException as error:  # foreign code may raise anything; SystemExit, too, would end only this thread
            self._error = first_line(error)

    def write(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Pass the figures to the thread, unless it has failed."""
        self._tell()
        if not self._has_failed:
            self._figures.put((step, {f"{kind}/{name}": value for name, value in figures.items()}))

    def close(self) -> None:
        """Wait until all is sent, at most CLOSE_SECONDS."""
        self._figures.put(None)
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._error = f"it has not sent all of its records {CLOSE_SECONDS:g} s after the run's end"
        self._tell()

    def _tell(self) -> None:
        while self._news:
            self.say(self._news.pop(0))
        if self._error and not self._has_failed:
            self._has_failed = True
            self.say(
                f"run.loggers: {self._name} failed ({self._error}): the run continues without it, and metrics.jsonl "
                "has every record"
            )


REACH_SECONDS = 30.0
"""How long wandb tries to reach its server before the run is logged offline."""


class _WandbRun:
    """A run of Weights & Biases, or records on disk for `wandb sync`; a resumed run continues it.

    If the server cannot be reached, the figures are kept as with WANDB_MODE=offline, and a line is printed.
    """

    def __init__(self, rundir: RunDir, tell: Say, *, stated: Mapping[str, Any], from_step: int) -> None:
        try:
            import wandb
            from wandb import init  # a plain folder named wandb can be imported, too, but has no init
        except Exception as error:  # its dependencies may raise anything at import, for example an older protobuf
            raise ImportError(f"it cannot be imported, {first_line(error)}: pip install 'bigbatch[wandb]'") from error
        rundir.make_folder(rundir.path / "wandb")  # for wandb's own files
        arguments = {
            "project": "bigbatch",
            "name": rundir.path.name,
            **wandb_settings(),
            "id": _run_id(rundir, is_new=from_step == 0),
            "resume": "allow",
            "dir": str(rundir.path),
            "config": dict(stated),
        }
        # quiet: otherwise it would ask for a key on the terminal and replace standard output
        settings = wandb.Settings(console="off", silent=True, init_timeout=REACH_SECONDS)
        wandb.setup(settings)
        try:
            run = init(**arguments, settings=settings)
        except Exception as error:  # no network, no key, no answer
            if arguments.get("mode") == "offline":
                raise
            tell(f"wandb cannot be reached ({first_line(error)}): the run continues, logged offline")
            # a new id: wandb considers the other one in use
            offline = {**arguments, "mode": "offline", "id": _run_id(rundir, is_new=True)}
            run = init(**offline, settings=settings)
        tell(f"wandb: {_where(run)}")
        # our own step count: a resumed run repeats steps, and wandb's own count cannot go back
        run.define_metric("*", step_metric="step")
        self._run = run

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        self._run.log({"step": step, **figures})

    def finish(self) -> None:
        self._run.finish()


def _where(run: Any) -> str:
    if run.disabled:
        return "disabled by WANDB_MODE: nothing is kept or sent"
    return f"run {run.id} " + (
        f"in {Path(run.dir).parent}, which `wandb sync` sends" if run.offline else f"at {run.url}"
    )


def _run_id(rundir: RunDir, *, is_new: bool) -> str:
    """Return the run's id in wandb, which the run folder keeps."""
    path = rundir.wandb_id
    if not is_new and path.is_file() and (kept := path.read_text().strip()).isalnum():
        return kept
    rundir.write_text(path, f"{(run_id := secrets.token_hex(4))}\n")
    return run_id


MAX_PARAMS = 100
"""MLflow's limit of parameters in one request."""


class _MlflowRun:
    """A run in MLflow, at MLFLOW_TRACKING_URI, else in RUN/mlflow; a resumed run continues it."""

    def __init__(self, rundir: RunDir, tell: Say, *, stated: Mapping[str, Any], from_step: int) -> None:
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
        kept = rundir.mlflow_id.read_text().strip() if from_step and rundir.mlflow_id.is_file() else ""
        if kept:
            client.update_run(kept, status="RUNNING")
        else:
            found = client.get_experiment_by_name(name)
            experiment = found.experiment_id if found else client.create_experiment(name)
            kept = client.create_run(experiment, run_name=settings.get("run_name", rundir.path.name)).info.run_id
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


def figures_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record by name, metrics with the prefix metrics/; without step and time."""
    own = {f"metrics/{name}": value for name, value in record.get("metrics", {}).items()}
    others = ("step", "time", ELAPSED)
    return {name: value for name, value in {**record, **own}.items() if is_number(value) and name not in others}


class _TensorBoardRun:
    """Event files; a resumed run removes the events of the steps that it repeats.

    The import takes up to half a second. On the logger's thread no other rank waits for it after rank 0 is lost.
    """

    def __init__(self, rundir: RunDir, tell: Say, *, stated: Mapping[str, Any], from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not isinstance(threading.excepthook, _WithoutTensorBoard):
            threading.excepthook = _WithoutTensorBoard(threading.excepthook)
        rundir.make_folder(rundir.tensorboard)
        self._events = SummaryWriter(str(rundir.tensorboard), purge_step=from_step + 1)

    def log(self, step: int, figures: dict[str, float]) -> None:
        """Pass the figures to TensorBoard's own thread; a later call raises that thread's errors."""
        for name, value in figures.items():
            self._events.add_scalar(name, value, step)

    def finish(self) -> None:
        self._events.close()


@dataclass(frozen=True)
class _WithoutTensorBoard:
    """Report a thread's exception, except TensorBoard's: its next call raises it, and the logger prints one line."""

    report: Callable[[threading.ExceptHookArgs], object]

    def __call__(self, ended: threading.ExceptHookArgs) -> None:
        if not type(ended.thread).__module__.startswith("tensorboard."):
            self.report(ended)


SESSIONS: dict[str, Callable[..., Any]] = {"tensorboard": _TensorBoardRun, "wandb": _WandbRun, "mlflow": _MlflowRun}


def open_loggers(config: Config, rundir: RunDir, *, from_step: int, say: Say) -> list[BackgroundLogger]:
    how = {"stated": asdict(config), "from_step": from_step}
    return [BackgroundLogger(name, partial(SESSIONS[name], rundir, **how), say=say) for name in config.run.loggers]
