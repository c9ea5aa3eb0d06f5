"""Contestants of exchange.py, and how each of them sums a tensor."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.comm.job import HOROVOD_ROUND, Job, open_horovod, open_mpi
from bigbatch.comm.algorithms.hybrid import HybridTable
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import connect, make_wire
from bigbatch.comm.rendezvous.by_mpi import import_mpi

CONTESTANTS = (
    "hybrid",
    "hierarchical",
    "gloo",
    "sharded",
    "ring",
    "hybrid fp16",
    "horovod",
    "mpi",
    "doubling",
    "native",
    "hierarchical over mpi",
)
"""Contestants, in the order in which they get time."""
HYBRIDS = {"hybrid": "float32", "hybrid fp16": "float16"}


@dataclass(frozen=True)
class Entry:
    """How a contestant sums a tensor, and which memory the tensor needs."""

    sum_: Callable[[Tensor], object]
    memory: str
    """"plain", or the backend whose allocate() makes the tensor."""
    enter: Callable[[Tensor], object] = lambda tensor_N: None
    leave: Callable[[], object] = lambda: None
    round: int = 1
    wire: str = "float32"


Allocate = Callable[[int], Tensor]


def make_entries(job: Job) -> tuple[dict[str, Entry], dict[str, Allocate], dict[str, str]]:
    """Return contestants that can run here, their memory, and why others cannot; hybrid without table. Collective."""
    ours = job.communicator
    entries = {name: ours_entry(ours.with_algorithm(name)) for name in ours.algorithms}
    entries |= {name: Entry(no_table_yet, "tcp", wire=wire) for name, wire in HYBRIDS.items()}
    entries["gloo"] = Entry(dist.all_reduce, "plain")
    allocators: dict[str, Allocate] = {"tcp": allocate_from(ours), "plain": torch.zeros}
    left_out: dict[str, str] = {}
    if isinstance(world := open_mpi(job), str):
        left_out |= {"mpi": world, "hierarchical over mpi": world}
    else:
        entries["mpi"] = Entry(lambda tensor_N: world.Allreduce(import_mpi().IN_PLACE, tensor_N.numpy()), "plain")
        over_mpi = connect(
            backend="mpi",
            algorithm="hierarchical",
            timeout_seconds=ours.control.timeout_seconds,
            warn_seconds=ours.control.timeout_seconds,
        )
        job.others.append(over_mpi)
        entries["hierarchical over mpi"] = ours_entry(over_mpi, memory="mpi")
        allocators["mpi"] = allocate_from(over_mpi)
    horovod = open_horovod(job)
    if isinstance(horovod, str):
        left_out["horovod"] = horovod
    else:
        entries["horovod"] = horovod_entry(horovod)
    return entries, allocators, left_out


def allocate_from(communicator: Communicator) -> Allocate:
    """Allocate tensors that this communicator sums without copies."""
    return lambda num_elements: communicator.allocate(num_elements, torch.float32)


def no_table_yet(tensor_N: Tensor) -> None:
    """Placeholder of hybrid before its table is made. Raises: AssertionError."""
    raise AssertionError("hybrid has no table yet")


def ours_entry(communicator: Communicator, *, memory: str = "tcp", wire: str = "float32") -> Entry:
    """Make the entry of one of our algorithms."""
    return Entry(lambda tensor_N: communicator.sum_(tensor_N, label="benchmark"), memory, wire=wire)


def hybrid_entry(job: Job, table: HybridTable, *, wire: str) -> Entry:
    """Make the entry of hybrid with its table. Collective."""
    own = make_wire(None if wire == "float32" else wire)
    return ours_entry(job.communicator.with_algorithm("hybrid", table=table, wire=own), wire=wire)


def horovod_entry(horovod: Any) -> Entry:
    """Make the entry of Horovod, started for each round of repetitions, with one sum to warm up."""

    def sum_(tensor_N: Tensor) -> None:
        horovod.allreduce_(tensor_N, op=horovod.Sum, name="benchmark")

    def enter(tensor_N: Tensor) -> None:
        horovod.init()
        sum_(tensor_N)

    return Entry(sum_, "plain", enter=enter, leave=horovod.shutdown, round=HOROVOD_ROUND)
