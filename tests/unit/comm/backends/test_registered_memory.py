"""Memory that is registered with NCCL: what is asked of torch, and when. That NCCL sums there is tests/gpu's affair."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from one_rank import transport_over
from played_gpus import PlayedGpus, PlayedPool

from bigbatch.comm.backends.registered_memory import RegisteredMemory
from bigbatch.errors import CommError

GPU = torch.device("cuda", 1)


class PlayedNccl:
    """A group of NCCL's and its backend in one; asked: the calls for each pool."""

    mem_allocator = "ncclMemAlloc"

    def __init__(self) -> None:
        self.asked: list[tuple[str, PlayedPool]] = []
        self.windows: list[bool] = []

    def _get_backend(self, device: torch.device) -> "PlayedNccl":
        assert device == GPU
        return self

    def register_mem_pool(self, pool: PlayedPool, symm: bool = False) -> None:
        assert pool.is_used, "later tensors are not registered"
        assert pool.allocator == self.mem_allocator
        self.asked.append(("register", pool))
        self.windows.append(symm)

    def deregister_mem_pool(self, pool: PlayedPool) -> None:
        self.asked.append(("deregister", pool))

    @property
    def held(self) -> list[PlayedPool]:
        gone = [pool for what, pool in self.asked if what == "deregister"]
        return [pool for what, pool in self.asked if what == "register" and pool not in gone]


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> PlayedGpus:
    monkeypatch.setattr(torch.cuda, "nccl", SimpleNamespace(version=lambda: (2, 30, 7)))
    return PlayedGpus(2, monkeypatch=monkeypatch)


@pytest.mark.parametrize("is_symmetric", [False, True])
def test_each_tensor_is_registered_until_it_is_given_back(is_symmetric: bool) -> None:
    nccl = PlayedNccl()
    memory = RegisteredMemory(nccl, GPU, is_symmetric=is_symmetric)
    assert nccl.held == [], "the trial is over"
    tensors = [memory.allocate(length, torch.half) for length in (3, 5)]
    assert [tensor_N.tolist() for tensor_N in tensors] == [[0.0] * 3, [0.0] * 5]
    assert len(nccl.held) == 2
    memory.release(tensors[0])
    assert len(nccl.held) == 1
    for _ in range(2):
        memory.close()
    memory.release(tensors[1])  # by a reducer that is closed after its connection
    assert nccl.held == []
    assert nccl.windows == [is_symmetric] * 3


def test_memory_is_taken_out_when_the_gpu_is_done_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl = PlayedNccl()
    memory = RegisteredMemory(nccl, GPU, is_symmetric=False)
    held: list[tuple[torch.device, int]] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: held.append((device, len(nccl.held))))
    tensor_N = memory.allocate(3, torch.half)
    memory.release(tensor_N)
    memory.allocate(3, torch.half)
    memory.close()
    assert held == [(GPU, 1)] * 2


def test_communicator_takes_its_buffers_there() -> None:
    nccl = PlayedNccl()
    transport = transport_over(registered=RegisteredMemory(nccl, GPU, is_symmetric=False))
    kept_N, given_N = transport.allocate(*[(4, torch.float32)] * 2)
    transport.release(given_N)
    assert len(nccl.held) == 1
    assert kept_N.tolist() == [0.0] * 4


def refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("NCCL says no\nwith a stack")


@pytest.mark.parametrize(
    ("is_symmetric", "spoil", "named"),
    [
        (True, lambda nccl, patch: patch.setattr(torch.cuda.nccl, "version", lambda: (2, 26, 2)), "2.27"),
        (False, lambda nccl, patch: patch.delattr(PlayedNccl, "mem_allocator"), "mem_allocator"),
        (True, lambda nccl, patch: patch.setattr(nccl, "register_mem_pool", lambda pool: None), "symm"),
        (False, lambda nccl, patch: patch.setattr(nccl, "register_mem_pool", refuse), "NCCL says no"),
    ],
)
def test_memory_that_is_not_to_be_had_is_refused(
    is_symmetric: bool,
    spoil: Callable[[PlayedNccl, pytest.MonkeyPatch], None],
    named: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nccl = PlayedNccl()
    spoil(nccl, monkeypatch)
    key = f"comm.buffers={'symmetric' if is_symmetric else 'registered'}"
    with pytest.raises(CommError, match=naming(key, torch.__version__, "cuda:1", named, "set it to torch")) as caught:
        RegisteredMemory(nccl, GPU, is_symmetric=is_symmetric)
    assert "\n" not in str(caught.value)
