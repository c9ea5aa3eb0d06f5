"""Loggers for the numbers of metrics.jsonl: TensorBoard, Weights & Biases and MLflow."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from bigbatch.errors import first_line
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.run.background_logger import BackgroundLogger
from bigbatch.trainer.run.cost import ELAPSED
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.run.mlflow_run import log_to_mlflow
from bigbatch.trainer.run.weights_and_biases import log_to_wandb

Say = Callable[[str], None]


def figures_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by name, user metrics with the prefix metrics/; without step and time."""
    own = {f"metrics/{name}": value for name, value in record.get("metrics", {}).items()}
    named = {name: value for name, value in {**record, **own}.items() if isinstance(value, int | float)}
    return {name: value for name, value in named.items() if name not in ("step", "time", ELAPSED)}


class TensorBoard:
    """Writes event files; a resumed run removes the events of the steps that it repeats."""

    def __init__(self, rundir: RunDir, *, from_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not isinstance(threading.excepthook, _WithoutTensorBoard):
            threading.excepthook = _WithoutTensorBoard(threading.excepthook)
        rundir.make_folder(rundir.tensorboard)
        self._events = SummaryWriter(str(rundir.tensorboard), purge_step=from_step + 1)

    def write(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Pass the figures to TensorBoard's thread; its errors are raised by a later call."""
        for name, value in figures.items():
            self._events.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._events.close()


Logger = TensorBoard | BackgroundLogger
"""Logs figures without waiting for a network; an exception removes it from the run, which continues."""


@dataclass(frozen=True)
class _WithoutTensorBoard:
    """Report a thread's exception, except TensorBoard's: its next call raises it, and Guarded prints one line."""

    report: Callable[[threading.ExceptHookArgs], object]

    def __call__(self, ended: threading.ExceptHookArgs) -> None:
        if not type(ended.thread).__module__.startswith("tensorboard."):
            self.report(ended)


class Guarded:
    """Passes figures to a logger until it fails, which is printed once: a logger must not end a run."""

    def __init__(self, name: str, make: Callable[[], Logger], *, say: Say) -> None:
        self._name, self._say = name, say
        self._logger: Logger | None = None
        self._try(lambda: setattr(self, "_logger", make()))

    def write(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        if logger := self._logger:
            self._try(lambda: logger.write(kind, step, figures))

    def close(self) -> None:
        if logger := self._logger:
            self._try(logger.close)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:  # foreign code may raise anything
            self._logger = None
            self._say(
                f"run.loggers: {self._name} failed ({first_line(error)}): the run goes on without it, and "
                "metrics.jsonl has every record"
            )


def open_loggers(config: Config, rundir: RunDir, *, from_step: int, say: Say) -> list[Guarded]:
    """Open the loggers of run.loggers, in order."""
    makers: dict[str, Callable[[], Logger]] = {
        "tensorboard": lambda: TensorBoard(rundir, from_step=from_step),
        "wandb": lambda: log_to_wandb(rundir, stated=asdict(config), from_step=from_step, say=say),
        "mlflow": lambda: log_to_mlflow(rundir, stated=asdict(config), from_step=from_step, say=say),
    }
    return [Guarded(name, makers[name], say=say) for name in config.run.loggers]
