"""Jobs whose other ranks never answer."""

import pytest

from bigbatch.comm.rendezvous import job_control, limits
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.job_control import JobControl


def hurry_count(monkeypatch: pytest.MonkeyPatch, *, seconds: float = 0.2) -> None:
    """Do not wait long for ranks that will not answer; the store may still take its time, as on a busy machine."""
    monkeypatch.setattr(limits, "ROLL_CALL_SECONDS", seconds)
    monkeypatch.setattr(limits, "LINGER_SECONDS", 0.0)
    for module, limit in ((limits, "REQUESTS_SECONDS"), (job_control, "SILENCE_SECONDS")):
        monkeypatch.setattr(module, limit, 60.0)


def half_a_job(env: ProcessEnv, seconds: float) -> JobControl:
    """Rank 0 of a job of two; rank 1 has said where it runs, and is silent from now on. seconds: its limit since."""
    met = JobControl(env, timeout_seconds=60)
    met.timeout_seconds = seconds
    met.store.set("bigbatch/host/1", "node1")
    return met
