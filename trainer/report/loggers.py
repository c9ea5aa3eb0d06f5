"""Loggers for the numbers of metrics.jsonl, each on a thread: TensorBoard, Weights & Biases, MLflow, and your own."""

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from queue import Queue
from threading import Thread
from typing import Any

from bigbatch.errors import first_line
from bigbatch.parts import load_named
from bigbatch.trainer.config.checks import LOGGERS
from bigbatch.trainer.config.dotted import is_import_path, own_class
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.report.cost import ELAPSED
from bigbatch.words import is_number

CLOSE_SECONDS = 60.0
"""Limit of the wait for unsent data at the end of a run."""

Say = Callable[[str], None]
"""Prints a line."""
Open = Callable[..., Any]
"""(run folder, Say, stated=, from_step=) -> a session: an object with log(step, figures) and finish()."""


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
        self._has_failed, self._until = False, 0.0
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

    def end(self) -> None:
        """Let the thread end after what is left to send; close() waits for it, at most CLOSE_SECONDS from now."""
        self._until = time.monotonic() + CLOSE_SECONDS
        self._figures.put(None)

    def close(self) -> None:
        """Wait until all is sent."""
        if not self._until:
            self.end()
        self._thread.join(max(0.0, self._until - time.monotonic()))
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


def figures_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record by name, metrics with the prefix metrics/; without step and time."""
    own = {f"metrics/{name}": value for name, value in record.get("metrics", {}).items()}
    others = ("step", "time", ELAPSED)
    return {name: value for name, value in {**record, **own}.items() if is_number(value) and name not in others}


def find_loggers(config: Config) -> dict[str, Open]:
    """Return how to open the session of each logger in run.loggers. Raises: ConfigError for one that does not fit."""
    return {
        name: _find_own(name) if is_import_path(name) else load_named(LOGGERS, name, key="run.loggers")
        for name in config.run.loggers
    }


def _find_own(name: str) -> Open:
    """Return how to open a logger of another package, by its import path."""
    make = own_class(name, key=f"run.loggers: {name}", methods=("log", "finish"))

    def open_own(rundir: RunDir, tell: Say, *, stated: Mapping[str, Any], from_step: int) -> Any:
        return make(rundir.path, config=dict(stated), from_step=from_step)

    return open_own


def open_loggers(
    found: Mapping[str, Open], config: Config, rundir: RunDir, *, from_step: int, say: Say
) -> list[BackgroundLogger]:
    """Open the loggers that find_loggers() has found, each on its own thread."""
    how = {"stated": asdict(config), "from_step": from_step}
    return [BackgroundLogger(name, partial(open_, rundir, **how), say=say) for name, open_ in found.items()]
