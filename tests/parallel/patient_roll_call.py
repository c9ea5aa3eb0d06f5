"""A roll call that gives every rank but the lost one all the time that a busy machine may take to answer."""

from collections.abc import Callable

from bigbatch.comm.rendezvous import roll_call
from bigbatch.comm.rendezvous.bounded_store import wait_until
from bigbatch.comm.rendezvous.job_store import KeyValue
from bigbatch.comm.rendezvous.roll_call import RollCall

PATIENCE_SECONDS = 60.0


def await_all_but(victim: int) -> None:
    """Let this rank's roll call end as soon as only the victim is missed, and not before for a minute."""
    roll_call.ROLL_CALL_SECONDS = PATIENCE_SECONDS
    missing, only_victim = RollCall._missing, False

    def remembered(self: RollCall, store: KeyValue) -> set[int]:
        nonlocal only_victim
        found = missing(self, store)
        only_victim = found == {victim}
        return found

    def shortened(is_so: Callable[[], bool], seconds: float, *, pauses_seconds: tuple[float, float]) -> bool:
        nonlocal only_victim
        only_victim = False
        return wait_until(lambda: is_so() or only_victim, seconds, pauses_seconds=pauses_seconds)

    RollCall._missing = remembered  # type: ignore[method-assign]
    roll_call.wait_until = shortened  # type: ignore[attr-defined]
