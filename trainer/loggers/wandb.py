"""A run in Weights & Biases."""

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bigbatch.errors import first_line, pip_install
from bigbatch.files import read_plain
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.loggers.names import name_of
from bigbatch.user_settings import wandb_settings

REACH_SECONDS = 30.0
"""How long wandb tries to reach its server before the run is logged offline."""


class WandbRun:
    """A run of Weights & Biases, or records on disk for `wandb sync`; a resumed run continues it.

    If the server cannot be reached, the figures are kept as with WANDB_MODE=offline, and a line is printed.
    """

    def __init__(
        self, rundir: RunDir, tell: Callable[[str], None], *, stated: Mapping[str, Any], from_step: int
    ) -> None:
        try:
            import wandb
            from wandb import init  # a plain folder named wandb can be imported, too, but has no init
        except Exception as error:  # its dependencies may raise anything at import, for example an older protobuf
            raise ImportError(f"it cannot be imported, {first_line(error)}: {pip_install('wandb')}") from error
        rundir.make_folder(rundir.path / "wandb")  # for wandb's own files
        named = name_of(rundir)
        arguments = {
            "project": "bigbatch",
            "name": named.name,
            **({"group": named.sweep} if named.sweep else {}),
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
            # a new id: wandb considers the other one in use; the next resumed run continues the run of a first start
            offline = {**arguments, "mode": "offline", "id": secrets.token_hex(4)}
            if from_step == 0:
                offline["id"] = _run_id(rundir, is_new=True)
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
    if not is_new and path.is_file() and (kept := read_plain(path).decode().strip()).isalnum():
        return kept
    rundir.write_text(path, f"{(run_id := secrets.token_hex(4))}\n")
    return run_id
