"""Ranks that are threads of this process: messages go through queues and are counted, or through gloo."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Barrier
from typing import Any

import pytest
import torch
from played_gpus import PlayedGpus
from played_nccl import PlayedNccl
from torch import Tensor
from torch.distributed import HashStore
from torch.testing._internal.distributed import multi_threaded_pg

from bigbatch.comm.algorithms.wire import Staging, Wire
from bigbatch.comm.backends.base import InFlight
from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.communicator import Communicator, make_communicator
from bigbatch.comm.connection import Connection
from bigbatch.comm.rendezvous.bounded_store import BoundedStore
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.topology import make_topology
from bigbatch.comm.transport import Transport


class Meeting:
    """Exchanges values between ranks that are threads."""

    def __init__(self, num_ranks: int) -> None:
        self.values: list[Any] = [None] * num_ranks
        self._barrier = Barrier(num_ranks, timeout=200)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Give this rank's value, and return the values of all, in rank order."""
        self.values[rank] = value
        self._barrier.wait()
        everyone = list(self.values)
        self._barrier.wait()
        return everyone


@dataclass
class Post:
    """Letterboxes between ranks, and a record of what went through: (from, to) -> (messages, bytes)."""

    boxes: dict[tuple[int, int], "SimpleQueue[Tensor]"] = field(default_factory=dict)
    messages: Counter[tuple[int, int]] = field(default_factory=Counter)
    num_bytes: Counter[tuple[int, int]] = field(default_factory=Counter)

    def box(self, source: int, to: int) -> "SimpleQueue[Tensor]":
        """Made on first use; dict.setdefault is atomic."""
        return self.boxes.setdefault((source, to), SimpleQueue())


class PostBackend(SingleBackend):
    """Messages of one rank by Post."""

    def __init__(self, rank: int, post: Post) -> None:
        super().__init__()
        self.rank = rank  # type: ignore[misc]
        self._post = post

    def start_send(self, tensor_N: Tensor, *, to: int) -> InFlight:
        """A copy into the box."""
        self._post.messages[self.rank, to] += 1
        self._post.num_bytes[self.rank, to] += tensor_N.nbytes
        self._post.box(self.rank, to).put(tensor_N.clone())
        return InFlight()

    def start_receive(self, tensor_N: Tensor, *, source: int) -> InFlight:
        """Taken out when waited for."""
        return InFlight(_Letter(tensor_N, self._post.box(source, self.rank)).wait)

    def start_exchange(self, *, send: Tensor, to: int, receive: Tensor, source: int) -> InFlight:
        """Both."""
        return InFlight(self.start_send(send, to=to).wait, self.start_receive(receive, source=source).wait)


@dataclass(frozen=True)
class _Letter:
    tensor_N: Tensor
    box: "SimpleQueue[Tensor]"

    def wait(self) -> None:
        letter_N = self.box.get(timeout=120)
        assert letter_N.dtype == self.tensor_N.dtype
        self.tensor_N.copy_(letter_N)


def sum_by_threads(algorithm: Callable[..., None], tensors: Sequence[Tensor], *, wire: Wire, **options: object) -> Post:
    """Sum the tensors, one per rank, in place."""
    post, ranks = Post(), tuple(range(len(tensors)))

    def one(rank: int) -> None:
        algorithm(tensors[rank], PostBackend(rank, post), ranks, wire=wire, staging=Staging(), **options)

    with ThreadPoolExecutor(len(tensors)) as pool:
        list(pool.map(one, ranks))
    return post


def run_over_played_nccl(
    job: Callable[[Communicator], None], hosts: Sequence[str], *, monkeypatch: pytest.MonkeyPatch
) -> PlayedNccl:
    """Let as many ranks as there are hosts do a job over gloo that plays NCCL, each in torch's state of its own."""
    PlayedGpus(1, monkeypatch=monkeypatch)
    played, store = PlayedNccl(monkeypatch, carrier="gloo"), HashStore()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")

    def one(rank: int) -> None:
        env = replace(ALONE, rank=rank, world_size=len(hosts), local_rank=rank, local_size=len(hosts))
        control = JobControl(ALONE, timeout_seconds=300)
        control.rank, control.world_size = rank, len(hosts)
        control.store = BoundedStore(store, seconds=300)
        control.store.set(f"bigbatch/host/{rank}", env.host)
        backend = TorchDistributedBackend(env, control, library="nccl", device=torch.device("cuda", 0))
        connection, device = Connection(env, control, backend, make_topology(hosts, rank=rank)), torch.device("cpu")
        job(make_communicator(Transport(connection, device), "native"))
        backend.close()

    if not hasattr(multi_threaded_pg.ThreadLocalWorld, "comms"):  # torch 2.11's own world has them, this one not
        monkeypatch.setattr(multi_threaded_pg.ThreadLocalWorld, "comms", [], raising=False)
    multi_threaded_pg._install_threaded_pg()
    isolate: Callable[[bool], None] = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    try:
        with ThreadPoolExecutor(len(hosts)) as pool:
            list(pool.map(one, range(len(hosts))))
    finally:
        isolate(False)
        multi_threaded_pg._uninstall_threaded_pg()
    return played
