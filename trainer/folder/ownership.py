"""Ownership of the run folder by the first rank of each group of a job, and its writes while the others wait."""

from collections.abc import Callable, Sequence
from pathlib import Path

from bigbatch.comm.rendezvous.control import Control
from bigbatch.errors import CheckpointError, PeerLostError, UserError
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.owner import Owner, own_claim, take, take_over


def write_on_first(write: Callable[[], str | None], control: Control, *, what: str, timeout_seconds: float) -> str:
    """Write on rank 0, and return its result on all ranks. Collective, over the control channel.

    All ranks wait here, because a write may take longer than the time limit of the next collective.
    what: name of the operation in messages.
    Raises: on rank 0 the write's error; on other ranks CheckpointError with the message of a UserError, and
    PeerLostError naming rank 0 for any other error and after timeout_seconds.
    """
    error: Exception | None = None
    answer = ""
    if control.rank == 0:
        try:
            # encoded in one text: + and the result, - and a user's error, ! and an unexpected error
            answer = f"+{write() or ''}"
        except UserError as found:
            error, answer = found, f"-{found}"
        except Exception as found:  # any error: the other ranks must not wait until their time limit
            error, answer = found, f"!{': '.join(filter(None, (type(found).__name__, str(found))))}"
    answer = control.tell_all(answer, what=what, timeout_seconds=timeout_seconds)
    if answer[0] == "+":
        return answer[1:]
    where = control.host_of(0)
    control.gather_text("", what=what)  # rank 0 may host the store: it ends after all have read the reason
    if error:
        raise error
    if answer[0] == "-":
        raise CheckpointError(answer[1:])
    raise PeerLostError(f"rank {control.rank}: {what} failed; no answer from rank 0 on {where}, which met {answer[1:]}")


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
