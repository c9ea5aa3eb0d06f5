"""A count of the failure detector that gives all ranks but the lost one as long as a busy machine may need."""

from bigbatch.comm.rendezvous import failures, limits
from bigbatch.comm.rendezvous.failures import JobState

PATIENCE_SECONDS = 60.0


def await_all_but(victim: int) -> None:
    """Let this rank's count end as soon as only the victim is missing, and not before for a minute."""
    limits.ROLL_CALL_SECONDS = PATIENCE_SECONDS
    count = failures._count

    def counted(state: JobState, rank: int, now: float) -> frozenset[int] | None:
        return state.missing if state.missing == {victim} and state.caller == rank else count(state, rank, now)

    failures._count = counted
