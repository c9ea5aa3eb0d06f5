"""Event files for TensorBoard."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bigbatch.trainer.folder.folder import RunDir


class TensorBoardRun:
    """Event files, in a folder that a sweep names; a resumed run removes the events of the steps that it repeats.

    The import takes up to half a second. On the logger's thread no other rank waits for it after rank 0 is lost.
    """

    def __init__(
        self, rundir: RunDir, tell: Callable[[str], None], *, stated: Mapping[str, Any], from_step: int
    ) -> None:
        from torch.utils.tensorboard import SummaryWriter

        if not isinstance(threading.excepthook, _WithoutTensorBoard):
            threading.excepthook = _WithoutTensorBoard(threading.excepthook)
        folder, run = rundir.tensorboard, None
        if rundir.path.parent.parent.name == "points":
            from bigbatch.trainer.loggers.names import name_of

            run = name_of(rundir)
            folder = run.events_folder(rundir)
        rundir.make_folder(folder)
        self._events = SummaryWriter(str(folder), purge_step=from_step + 1)
        if run:
            run.write_hparams(self._events, stated, from_step=from_step)

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
