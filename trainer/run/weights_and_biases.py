"""Weights & Biases: the one door to wandb, which a run knocks on from a thread of its own."""

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
"""How long wandb tries for its server, before the run is logged as offline."""
CLOSE_SECONDS = 60.0
"""How long the end of a run waits for what is still to be sent."""


class WeightsAndBiases:
    """Sends figures to a run of Weights & Biases, or keeps them on disk for `wandb sync`; a resumed run goes on in it.

    wandb is spoken to by a thread alone, so neither network nor server holds a step up. Where it cannot be reached the
    figures are kept as with WANDB_MODE=offline, and say is told so.
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
        except Exception as error:  # what it imports in turn may raise anything, as an older protobuf does
            raise ImportError(f"it cannot be imported, {first_line(error)}: pip install 'bigbatch[wandb]'") from error
        self._wandb: Any = wandb
        self._rundir = rundir
        rundir.make_folder(rundir.path / "wandb")  # in which wandb keeps its own files
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
            # steps of our own count: a resumed run may do some again, and wandb's own never go back
            run.define_metric("*", step_metric="step")
            while (figures := self._figures.get()) is not None:
                run.log(figures)
            run.finish()
        except BaseException as error:  # SystemExit, too, would end this thread alone
            self._error = error

    def _open(self) -> Any:
        wandb = self._wandb
        # quiet, or it would ask a terminal for a key, and take standard output over
        settings = wandb.Settings(console="off", silent=True, init_timeout=REACH_SECONDS)
        wandb.setup(settings)
        is_offline = self._arguments.get("mode") == "offline"
        try:
            run = wandb.init(**self._arguments, settings=settings)
        except Exception as error:  # no network, no key, no answer
            if is_offline:
                raise
            self._news.append(f"wandb cannot be reached ({first_line(error)}): the run goes on, logged as offline")
            # by a new id: wandb takes the other one for in use
            offline = {**self._arguments, "mode": "offline", "id": _run_id(self._rundir, is_new=True)}
            run = wandb.init(**offline, settings=settings)
        self._news.append(f"wandb: {_where(run)}")
        return run

    def write(self, kind: str, step: int, figures: Mapping[str, float]) -> None:
        """Hand the figures to the thread. Raises: RuntimeError with what that has met."""
        self._tell()
        self._figures.put({"step": step, **{f"{kind}/{name}": value for name, value in figures.items()}})

    def close(self) -> None:
        """Wait until all is sent, at most CLOSE_SECONDS. Raises: RuntimeError of what the thread met; TimeoutError."""
        self._figures.put(None)
        self._thread.join(CLOSE_SECONDS)
        self._tell()
        if self._thread.is_alive():
            raise TimeoutError(f"it has not sent all of its records {CLOSE_SECONDS:g} s after the run's end")

    def _tell(self) -> None:
        """Say what is new, by the run's own thread: the terminal is its."""
        while self._news:
            self._say(self._news.pop(0))
        if self._error:
            raise RuntimeError(first_line(self._error)) from self._error


def _where(run: Any) -> str:
    """Say where the records go."""
    if run.disabled:
        return "disabled, as WANDB_MODE tells: nothing is kept or sent"
    return f"run {run.id} " + (
        f"in {Path(run.dir).parent}, which `wandb sync` sends" if run.offline else f"at {run.url}"
    )


def _run_id(rundir: RunDir, *, is_new: bool) -> str:
    """Return the name that wandb knows the run by, which the run folder keeps."""
    path = rundir.wandb_id
    if not is_new and path.is_file() and (kept := path.read_text().strip()).isalnum():
        return kept
    rundir.write_text(path, f"{(run_id := secrets.token_hex(4))}\n")
    return run_id
