"""A roll call that gives every rank but the lost one all the time that a busy machine may take to answer."""

from bigbatch.awake import awake_seconds
from bigbatch.comm.rendezvous import bounded_store, roll_call
from bigbatch.comm.rendezvous.job_store import KeyValue
from bigbatch.comm.rendezvous.roll_call import RollCall

PATIENCE_SECONDS = 60.0
LONG_AFTER_SECONDS = 3600.0


def await_all_but(victim: int) -> None:
    """Let this rank's roll call end as soon as nobody but the victim is missed, and not before for a minute."""
    roll_call.ROLL_CALL_SECONDS = PATIENCE_SECONDS
    missing, passed = RollCall._missing, 0.0

    def hurried(self: RollCall, store: KeyValue) -> set[int]:
        nonlocal passed
        found = missing(self, store)
        if found == {victim}:
            passed = LONG_AFTER_SECONDS
        return found

    RollCall._missing = hurried  # type: ignore[method-assign]
    bounded_store.awake_seconds = lambda: awake_seconds() + passed  # type: ignore[attr-defined]
