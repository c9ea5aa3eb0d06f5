"""Ranks of one process that share a store, and a watch each: a test says when one looks."""

import pytest
from torch._C._distributed_c10d import HashStore

from bigbatch.comm.rendezvous import control, watch
from bigbatch.comm.rendezvous.bounded_store import BoundedStore
from bigbatch.comm.rendezvous.control import Pending
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.rendezvous.failure_detector import FailureDetector
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.watch import Watch


class Rank:
    """One rank's control and watch; its thread is stopped, so that the test decides when it looks."""

    def __init__(self, rank: int, store: HashStore, *, world_size: int, ends_job: bool = False) -> None:
        self.said: list[str] = []
        self.pending: Pending | None = None
        self.control = JobControl(ALONE, timeout_seconds=60, warn_seconds=4)
        self.control.timeout_seconds = 8
        job = self.control
        job.rank, job.world_size, job.host = rank, world_size, f"node{rank}"
        job.store = BoundedStore(store, seconds=60)
        store.set(f"bigbatch/host/{rank}", job.host)
        job.detector = FailureDetector(job)
        self.watch = Watch(job, lambda: self.pending, ends_job=ends_job, say=self.said.append)
        self.watch.close()

    def waits(self, number: int, *, seconds: float, group: tuple[int, ...] | None = None) -> None:
        """This rank has waited so long in an operation."""
        self.pending = Pending(
            number, f"all-reduce of buffer {number} (fc.weight and 3 more)", watch.awake_seconds() - seconds, group
        )


def ranks(count: int, *, ends_job: bool = False) -> list[Rank]:
    store = HashStore()
    return [Rank(rank, store, world_size=count, ends_job=ends_job) for rank in range(count)]


def look(*several: Rank) -> None:
    for rank in several:
        rank.watch.look()


def let_time_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """So long that the others have had the time to write down that they wait."""
    now = watch.awake_seconds()
    for module in (watch, control):
        monkeypatch.setattr(module, "awake_seconds", lambda: now + 2.5)
