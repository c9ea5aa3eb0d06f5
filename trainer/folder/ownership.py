"""Ownership of the run folder by the first rank of each group of a job."""

from collections.abc import Callable, Sequence
from pathlib import Path

from bigbatch.comm.rendezvous.control import Control
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.on_first import write_on_first
from bigbatch.trainer.folder.owner import Owner, own_claim, take, take_over


class Ownership:
    """Ownership of the run folder by the first rank of each group of a job, until the block ends."""

    def __init__(self, config: Config) -> None:
        self._folder = Path(config.run.directory)
        self._seconds = config.run.checkpoint_timeout_seconds
        self.number = 0
        """Number of the owner's claim, equal on all ranks."""
        self.owner: Owner | None = None
        """Owner of the run folder, on the first rank only."""

    def take(self, control: Control) -> None:
        """Take the folder on the first rank, while the other ranks wait. Collective. Raises: RunFolderError."""
        self._hold(control, lambda: take(self._folder, own_claim(store=control.master)))

    def take_over(self, control: Control, *, lost: Sequence[tuple[str, int, str]] = ()) -> None:
        """Take the folder over from the former group, or from a lost rank. Collective. Raises: RunFolderError.

        lost: kernel, process number and start time of each lost rank.
        """
        self._hold(control, lambda: take_over(self._folder, number=self.number, store=control.master, lost=lost))

    def _hold(self, control: Control, make: Callable[[], Owner]) -> None:
        def hold() -> str:
            former, self.owner = self.owner, make()
            self.number = self.owner.number  # if telling it fails, this rank claims again
            if former:
                former.release()
            return str(self.owner.number)

        what = "claim of the run folder"
        self.number = int(write_on_first(hold, control, what=what, timeout_seconds=self._seconds))
        if control.rank != 0 and self.owner:  # this was the first rank of the former group
            self.owner.release()
            self.owner = None

    def __enter__(self) -> "Ownership":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.owner:
            self.owner.release(has_failed=error is not None)
