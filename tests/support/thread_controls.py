"""JobControl channels of ranks that are threads of this process and share a store."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch.distributed import HashStore

from bigbatch.comm.rendezvous.bounded_store import BoundedStore
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.rendezvous.failure_detector import FailureDetector
from bigbatch.comm.rendezvous.job_control import JobControl

SECONDS = 60.0
"""Longer than any wait of a slow machine."""
Result = TypeVar("Result")


def alone() -> JobControl:
    """The control channel of a single rank."""
    return JobControl(ALONE, timeout_seconds=SECONDS)


def on_ranks(num_ranks: int, job: Callable[[JobControl], Result]) -> list[Result]:
    """Return what a job returns on each rank; the hosts are node0, node1 and so on."""
    store = HashStore()

    def run(rank: int) -> Result:
        control = alone()
        control.rank, control.world_size, control.store = rank, num_ranks, BoundedStore(store, seconds=SECONDS)
        control.detector = FailureDetector(control)
        store.set(f"bigbatch/host/{rank}", f"node{rank}")
        return job(control)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))
