"""Write on the first rank, while the others wait."""

from collections.abc import Callable

from bigbatch.comm.rendezvous.control import Control
from bigbatch.errors import CheckpointError, PeerLostError, UserError


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
