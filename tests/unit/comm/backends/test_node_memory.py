"""Memory that ranks of one node share: two ranks are threads here; the real thing runs in tests/parallel."""

import errno
import gc
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from thread_ranks import Meeting

from bigbatch.comm.backends import node_memory
from bigbatch.comm.backends.node_memory import SMALLEST_SCRATCH_BYTES, NodeMemory
from bigbatch.comm.rendezvous.places import process_space
from bigbatch.comm.rendezvous.topology import make_topology
from bigbatch.errors import CommError

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux's memfd")


class Echo:
    """The control of rank 0, whose peers all show its own memory, or what stands for it."""

    rank, host = 0, "here"

    def __init__(self, num_ranks: int, *, instead: str | None = None) -> None:
        self._num_others, self._instead = num_ranks - 1, instead
        self.num_met = 0

    def gather_text(self, text: str, *, what: str) -> list[str]:
        self.num_met += 1
        return [text, *[self._instead or text] * self._num_others]

    gather = gather_text


def memories(hosts: Sequence[str], *, group_size: int | None = None) -> list[NodeMemory]:
    meeting = Meeting(len(hosts))

    def control_of(rank: int) -> Any:
        def exchange(text: str, what: str) -> list[str]:
            return meeting.exchange(rank, text)

        return SimpleNamespace(rank=rank, host="here", gather_text=exchange, gather=exchange)

    return [
        NodeMemory(make_topology(hosts, rank=rank, group_size=group_size), control_of(rank))
        for rank in range(len(hosts))
    ]


def allocate(ranks: Sequence[NodeMemory], num_elements: int, dtype: torch.dtype) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(lambda memory: memory.allocate((num_elements, dtype))[0], ranks))


def open_files() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_memory_shows_each_rank_what_the_others_of_its_node_write(dtype: torch.dtype) -> None:
    ranks = memories(["a", "b", "a"])
    tensors = allocate(ranks, 10, dtype)
    assert [float(tensor_N.sum()) for tensor_N in tensors] == [0.0] * 3
    for rank, tensor_N in enumerate(tensors):
        tensor_N.fill_(rank + 1)
    part = slice(3, 7)
    views = ranks[2].views(tensors[2][part])
    assert views is not None
    assert [view_N.tolist() for view_N in views] == [[1.0] * 4, [3.0] * 4]  # ranks 0 and 2
    tensors[0][3] = 5
    assert float(views[0][0]) == 5.0
    assert len(ranks[1].views(tensors[1]) or ()) == 1  # alone on its host


def test_memory_is_shared_only_within_a_node_group() -> None:
    ranks = memories(["a"] * 4, group_size=2)
    tensors = allocate(ranks, 4, torch.float32)
    for rank, tensor_N in enumerate(tensors):
        tensor_N.fill_(rank)
    assert [view_N[0].item() for view_N in ranks[3].views(tensors[3]) or ()] == [2.0, 3.0]


def test_memory_names_a_tensor_alike_on_all_ranks_and_others_not_at_all() -> None:
    ranks = memories(["a", "a"])
    first, second = allocate(ranks, 10, torch.float32), allocate(ranks, 10, torch.float32)
    for tensors in (first, second):
        assert ranks[0].name_of(tensors[0][2:5]) == ranks[1].name_of(tensors[1][2:5])
    names = {ranks[0].name_of(t) for t in (first[0], second[0], first[0][1:], first[0][:9])}
    assert len(names) == 4
    elsewhere_N = torch.zeros(3)
    assert ranks[0].views(elsewhere_N) is None
    assert ranks[0].name_of(elsewhere_N) == (-1, 0, 12)
    for memory, tensor_N in zip(ranks, first, strict=True):
        memory.release(tensor_N)
    assert ranks[0].views(first[0]) is None
    assert ranks[0].views(second[0]) is not None
    third = allocate(ranks, 10, torch.float32)
    assert ranks[0].name_of(third[0]) not in names


def test_memory_of_many_ranks_and_buffers_keeps_no_open_files() -> None:
    """A process may have 1,024 by default; each rank of a node has every buffer of every other one in use."""
    memory = NodeMemory(make_topology(["a"] * 64, rank=0), Echo(64))  # type: ignore[arg-type]
    before = open_files()
    buffers = [buffer_N for _ in range(20) for buffer_N in memory.allocate((1000, torch.float32))]
    assert open_files() == before
    for number, buffer_N in enumerate(buffers):
        buffer_N.fill_(number)
    for number, buffer_N in enumerate(buffers):
        assert [view_N[0].item() for view_N in memory.views(buffer_N) or ()] == [number] * 64


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EMFILE, errno.ENOMEM])
def test_memory_that_the_system_refuses_is_one_error(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a call that is forbidden or unknown is the container's seccomp profile."""

    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "memfd_create", refuse)
    memory = NodeMemory(make_topology(["a"] * 2, rank=0), Echo(2))  # type: ignore[arg-type]
    says = naming("rank 0 on here", "memfd_create", os.strerror(number), "BIGBATCH_HOST")
    with pytest.raises(CommError, match=says) as caught:
        memory.allocate((10, torch.float32))
    assert ("seccomp" in str(caught.value)) is (number in (errno.EPERM, errno.ENOSYS))


def test_memory_of_several_tensors_is_shared_at_once() -> None:
    """The ranks meet twice, map one piece each, and what one writes into a tensor is in that tensor of all."""
    echo = Echo(3)
    memory = NodeMemory(make_topology(["a"] * 3, rank=1), echo)  # type: ignore[arg-type]
    before = mapped_pieces()
    sizes = [(1000, torch.float32), (1, torch.float32), (3, torch.float64), (5000, torch.float16)]
    tensors = memory.allocate(*sizes)
    assert echo.num_met == 2
    assert mapped_pieces() - before == 3
    assert [(tensor_N.numel(), tensor_N.dtype) for tensor_N in tensors] == sizes
    for number, tensor_N in enumerate(tensors):
        assert not tensor_N.any()
        tensor_N.fill_(number + 1)
    for number, tensor_N in enumerate(tensors):
        views = memory.views(tensor_N)
        assert views
        assert [view_N.unique().tolist() for view_N in views] == [[number + 1]] * 3
    assert len({memory.name_of(tensor_N) for tensor_N in tensors}) == 4
    for number, tensor_N in enumerate(tensors):
        memory.release(tensor_N)
        assert [memory.views(each_N) is not None for each_N in tensors] == [later > number for later in range(4)]
    assert memory.allocate() == []
    del tensors, tensor_N, views
    assert mapped_pieces() == before


def test_memory_of_ranks_alone_on_their_hosts_is_not_shared() -> None:
    ranks = memories(["a", "b"])
    (own_N,) = ranks[0].allocate((3, torch.float32))  # without waiting for rank 1
    assert ranks[0].views(own_N) == (own_N,)
    elsewhere_N = torch.zeros(3)
    assert ranks[0].views(elsewhere_N) == (elsewhere_N,)


@pytest.mark.parametrize("hosts", [["a"], ["a", "b"]])
def test_memory_of_another_device_lies_elsewhere_even_where_nothing_is_shared(hosts: list[str]) -> None:
    memory = memories(hosts)[0]
    assert memory.views(torch.zeros(3, device="meta")) is None


def mapped_pieces() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:bigbatch")


def test_memory_scratch_that_is_outgrown_is_given_back() -> None:
    memory = NodeMemory(make_topology(["a"] * 4, rank=0), Echo(4))  # type: ignore[arg-type]
    finished: list[int] = []
    before = mapped_pieces()
    for doubling in range(3):
        size = SMALLEST_SCRATCH_BYTES << doubling
        lent_N = memory.scratch(size, torch.uint8, finish=lambda scratch_N: finished.append(scratch_N.numel()))
        lent_N.fill_(1)
        assert memory.views(lent_N) is not None
        assert mapped_pieces() - before == 4
    assert finished == [SMALLEST_SCRATCH_BYTES << doubling for doubling in range(2)]


def test_memory_scratch_grows_and_is_used_again() -> None:
    memory = memories(["a"])[0]
    memory.scratch = partial(memory.scratch, finish=lambda scratch_N: None)  # type: ignore[method-assign]
    small_N = memory.scratch(10, torch.float32)
    again_N = memory.scratch(20, torch.float16)
    assert (small_N.shape, small_N.dtype, again_N.shape, again_N.dtype) == ((10,), torch.float32, (20,), torch.float16)
    assert small_N.data_ptr() == again_N.data_ptr()
    large_N = memory.scratch(SMALLEST_SCRATCH_BYTES, torch.float64)
    assert large_N.numel() == SMALLEST_SCRATCH_BYTES
    assert memory.scratch(10, torch.float32).data_ptr() == large_N.data_ptr()


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        ("4194304 3 1 4096", "No such file or directory"),  # beyond Linux's largest process number
        ("{own} 0 1 4096", "another process has its number"),
    ],
)
def test_memory_that_cannot_be_opened_is_named(described: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    control = Echo(2, instead=described.format(own=os.getpid()))
    memory = NodeMemory(make_topology(["here", "here"], rank=0), control)  # type: ignore[arg-type]
    before = open_files()
    named = naming("rank 0", "rank 1", "here", f"({reason})", "BIGBATCH_HOST")
    with open(os.devnull, "r+b") as null:
        monkeypatch.setattr(os, "open", lambda path, flags, real=os.open: _stand_in(path, flags, real, null.fileno()))
        with pytest.raises(CommError, match=named):
            memory.allocate((10, torch.float32))
    assert open_files() == before


def test_memory_of_another_size_is_refused() -> None:
    """The other rank's pages would end before this rank's: reading one ends the process by SIGBUS."""
    memory = NodeMemory(make_topology(["here", "here"], rank=0), Echo(2, instead="1 2 3 8192"))  # type: ignore[arg-type]
    before = open_files()
    with pytest.raises(CommError, match=naming("rank 1", "8192 bytes", "rank 0", "4096", "loss")):
        memory.allocate((10, torch.float32), what="loss")
    assert open_files() == before


def _stand_in(path: object, flags: int, real: object, number: int) -> int:
    return os.dup(number) if str(path).endswith("/fd/0") else real(path, flags)  # type: ignore[operator]


def test_process_space_is_shared_only_where_ranks_see_each_others_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_space() == process_space() != f"process {os.getpid()}"

    def fail(_: str) -> str:
        raise OSError("no /proc")

    monkeypatch.setattr(node_memory.os, "readlink", fail)
    assert process_space() == f"process {os.getpid()}"  # so that each rank is a node of its own
