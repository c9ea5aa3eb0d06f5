"""Process groups of NCCL and gloo: which are made, for whom, and which are torn down.

torch's own bookkeeping of groups, over its fake ones, which talk to nobody: so a world may have any size here. NCCL is
played; that the real one does as it is told is tests/gpu's affair.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from played_gpus import PlayedGpus
from torch.distributed import HashStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from bigbatch.comm.backends.mpi import meet_by_mpi
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.environ import ALONE, ProcessEnv

GPU = torch.device("cuda", 2)


class PlayedLibrary:
    """torch.distributed, in which each NCCL or gloo group is a fake one; what is asked of it is written down."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[str, Any]] = []
        init, new_group = dist.init_process_group, dist.new_group

        def init_fake(library: str, *, device_id: torch.device | None, store: object, **options: Any) -> None:
            self.asked.append(("init", device_id))
            init("fake", store=FakeStore(), **options)

        def new_fake(ranks: list[int], *, backend: str, **options: Any) -> Any:
            self.asked.append(("new", ranks))
            return new_group(ranks, backend="fake", **options)

        def barrier(*, group: Any, device_ids: list[int] | None = None) -> None:
            self.asked.append(("barrier", device_ids))

        monkeypatch.setattr(dist, "init_process_group", init_fake)
        monkeypatch.setattr(dist, "new_group", new_fake)
        monkeypatch.setattr(dist, "barrier", barrier)

    def of(self, what: str) -> list[Any]:
        """What it was asked to do, of one kind."""
        return [detail for each, detail in self.asked if each == what]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedLibrary]:
    """Leaves no group behind."""
    PlayedGpus(4, monkeypatch=monkeypatch)
    yield PlayedLibrary(monkeypatch)
    if dist.is_initialized():
        dist.destroy_process_group()


def backend_of(library: str, *, rank: int = 0, world_size: int = 4) -> TorchDistributedBackend:
    """One rank's backend; no other rank lives."""
    met = Control(ALONE, timeout_seconds=5, find_master=meet_by_mpi)
    met.store = HashStore()
    env = ProcessEnv("torchrun", rank, world_size, rank, world_size, "here", ("127.0.0.1", 0))
    return TorchDistributedBackend(env, met, library=library, device=GPU if library == "nccl" else torch.device("cpu"))


def start_script(world_size: int = 4) -> None:
    """The script has a process group of its own, which is bound to no GPU."""
    dist.init_process_group("nccl", rank=0, world_size=world_size, store=None, device_id=None)


@pytest.mark.parametrize("is_in_script", [False, True])
def test_barrier_is_on_the_ranks_own_gpu(is_in_script: bool, library: PlayedLibrary) -> None:
    """In a script's group torch would take the current one."""
    if is_in_script:
        start_script()
    backend_of("nccl").close()
    assert library.of("barrier") == [[2], [2]]


def test_barrier_of_gloo_names_no_gpu(library: PlayedLibrary) -> None:
    backend_of("gloo").close()
    assert library.of("barrier") == [None]
