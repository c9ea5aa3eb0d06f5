"""Weights & Biases: the only module that uses wandb, on a thread of its own."""

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any

from bigbatch.comm.rendezvous.environ import wandb_settings
from bigbatch.errors import first_line
from bigbatch.trainer.run.folder import RunDir

REACH_SECONDS = 30.0
"""How long wandb tries to reach its server before the run is logged offline."""
CLOSE_SECONDS = 60.0
"""How long the end of a run waits for unsent data."""


class WeightsAndBiases:
    """Sends figures to a run of Weights & Biases, or keeps them on disk for `wandb sync`; a resumed run continues it.

    A thread makes all calls to wandb, so neither network nor server delays a step. If the server cannot be reached, the
    figures are kept as with WANDB_MODE=offline, and a line is printed.
    """

    def __init__(
        self,
        rundir: RunDir,
        *,
        stated: Mapping[str, Any],
        from_step: int,
        say: Callable[[str], None],
    ) -> None:
        """Start the thread. Raises: ImportError that names what to install."""
        try:
            import wandb
            from wandb import init  # noqa: F401  a folder named wandb, such as it leaves behind, imports, and has none
        except Exception as error:  # its dependencies may raise anything at import, for example an older protobuf
            raise ImportError(f"it cannot be imported, {first_line(error)}: pip install 'bigbatch[wandb]'") from error
        self._wandb: Any = wandb
        self._rundir = rundir
        rundir.make_folder(rundir.path / "wandb")  # for wandb's own files
        self._arguments = {
            "project": "bigbatch",
            "name": rundir.path.name,
            **wandb_settings(),
            "id": _run_id(rundir, is_new=from_step == 0),
            "resume": "allow",
            "dir": str(rundir.path),
            "config": dict(stated),
        }
        self._say = say
        self._news: list[str] = []
        self._error: BaseException | None = None
        self._figures: Queue[dict[str, float] | None] = Queue()
        self._thread = Thread(target=self._speak, name="wandb", daemon=True)
        self._thread.start()

    def _speak(self) -> None:
        try:
            run = self._open()
            # our own step count: a resumed run repeats steps, and wandb's own count cannot go back
            run.define_metric("*", step_metric="step")
            while (figures := self._figures.get()) is not None:
                run.log(figures)
            run.finish()
        except BaseException as error:  # SystemExit, too, would end only this thread
            self._error = error

    def _open(self) -> Any:
        wandb = self._wandb
        # quiet: otherwise it would ask for a key on the terminal and replace standard output
        settings = wandb.Settings(console="off", silent=True, init_timeout=REACH_SECONDS)
        wandb.setup(settings)
        is_offline = self._arguments.get("mode") == "offline"
        try:
            run = wandb.init(**self._arguments, settings=settings)
        except Exception as error:  # no network, no key, no answer
            if is_offline:
                raise
            self._news.append(f"wandb cannot be reached ({first_line(error)}): the run goes on, logged as offline")
            # a new id: wandb considers the other one in use
            offline = {**self._arguments, "mode": "offline", "id": _run_id(self._rundir, is_new=True)}
            run = wandb.init(**offline, settings=settings)
        self._news.append(f"wandb: {_where(run)}")
        return run

    def write(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Pass the figures to the thread. Raises: RuntimeError with the thread's error."""
        self._tell()
        self._figures.put({"step": step, **{f"{kind}/{name}": value for name, value in figures.items()}})

    def close(self) -> None:
        """Wait until all is sent, at most CLOSE_SECONDS. Raises: RuntimeError with the thread's error; TimeoutError."""
        self._figures.put(None)
        self._thread.join(CLOSE_SECONDS)
        self._tell()
        if self._thread.is_alive():
            raise TimeoutError(f"it has not sent all of its records {CLOSE_SECONDS:g} s after the run's end")

    def _tell(self) -> None:
        """Print news on the run's main thread, which owns the terminal."""
        while self._news:
            self._say(self._news.pop(0))
        if self._error:
            raise RuntimeError(first_line(self._error)) from self._error


def _where(run: Any) -> str:
    """Print where the records go."""
    if run.disabled:
        return "disabled, as WANDB_MODE tells: nothing is kept or sent"
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
