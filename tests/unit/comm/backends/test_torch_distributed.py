"""Process groups of NCCL and gloo: which are made, for which ranks, and which are torn down.

torch's own bookkeeping of groups, over fake ones, which do not communicate: a world may have any size here. NCCL is
played; that the real one does as it is told is tests/gpu's affair.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from error_texts import naming
from played_gpus import PlayedGpus
from played_nccl import PlayedNccl
from silent_ranks import hurry_count
from torch.distributed import HashStore

from bigbatch.comm.backends import torch_distributed
from bigbatch.comm.backends.in_flight import LateError
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.rendezvous import limits
from bigbatch.comm.rendezvous.bounded_store import BoundedStore
from bigbatch.comm.rendezvous.environ import ALONE, ProcessEnv
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.errors import CommError, PeerLostError

GPU = torch.device("cuda", 2)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedNccl]:
    PlayedGpus(4, monkeypatch=monkeypatch)
    yield PlayedNccl(monkeypatch)
    if dist.is_initialized():
        dist.destroy_process_group()


def backend_of(library: str, *, rank: int = 0, world_size: int = 4, **settings: Any) -> TorchDistributedBackend:
    met = JobControl(ALONE, timeout_seconds=5)
    met.store = BoundedStore(HashStore(), seconds=5)
    env = ProcessEnv("torchrun", rank, world_size, rank, world_size, "here", ("127.0.0.1", 0))
    return TorchDistributedBackend(
        env, met, library=library, device=GPU if library == "nccl" else torch.device("cpu"), **settings
    )


def start_script(world_size: int = 4) -> None:
    dist.init_process_group("nccl", rank=0, world_size=world_size, store=None, device_id=None)


@pytest.mark.parametrize("is_in_script", [False, True])
def test_barrier_is_on_the_ranks_own_gpu(is_in_script: bool, library: PlayedNccl) -> None:
    """In a script's group torch would take the current one."""
    if is_in_script:
        start_script()
    backend_of("nccl").close()
    assert library.of("barrier") == [[2], [2]]


def test_registered_memory_is_closed_before_the_last_barrier(
    library: PlayedNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deregistration is collective, and needs the groups; a second close() does nothing."""
    closed: list[int] = []
    memory = SimpleNamespace(close=lambda: closed.append(len(library.of("barrier"))))
    monkeypatch.setattr(torch_distributed, "RegisteredMemory", lambda group, device, is_symmetric: memory)
    backend = backend_of("nccl")
    assert backend.register(GPU, is_symmetric=False) is memory
    for _ in range(2):
        backend.close()
    assert (closed, len(library.of("barrier"))) == ([1], 2)


# --- what a group of NCCL's is made with ---


@pytest.mark.parametrize("is_in_script", [False, True])
def test_messages_of_nccl_go_before_the_kernels_of_backward(is_in_script: bool, library: PlayedNccl) -> None:
    """Collectives are enqueued on the queue's stream; messages run on one of the group's own."""
    if is_in_script:
        start_script()
    backend = backend_of("nccl")
    made = library.of("options")[-1]
    assert made.is_high_priority_stream
    assert made._timeout == backend._groups.timeout  # torch warns if they differ


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL")
def test_settings_are_those_that_torchs_own_nccl_has() -> None:
    """What is played here and in test_registered_memory.py exists, by these names; it takes no GPU to ask."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    assert options.is_high_priority_stream
    assert isinstance(dist.ProcessGroupNCCL.mem_allocator, property)
    assert "symm: bool" in dist.ProcessGroupNCCL.register_mem_pool.__doc__
    assert dist.ProcessGroupNCCL.deregister_mem_pool.__doc__


# --- groups are made once ---


def test_groups_of_other_ranks_are_made_beside(library: PlayedNccl) -> None:
    """All ranks make those that are missing, in the same order."""
    backend = backend_of("gloo")
    before = len(library.of("new"))
    pairs = backend.new_group([[0, 1], [2, 3]])
    halves = backend.new_group([[0, 1], [2], [3]])
    assert library.of("new")[before:] == [[0, 1], [2, 3], [2], [3]]
    assert (pairs.ranks, pairs) == ((0, 1), halves)
    assert backend.new_group([[0, 1, 2, 3]]) == backend.world


def test_rank_whose_group_is_there_takes_part_in_the_split_for_others(library: PlayedNccl) -> None:
    backend = backend_of("nccl")
    assert backend.new_group([[0], [1, 2, 3]]).ranks == (0,)
    assert backend.new_group([[0], [1], [2, 3]]).ranks == (0,)
    assert library.of("split") == [[[0], [1, 2, 3]], [[1], [2, 3]]]


def test_split_in_which_a_rank_has_no_part_leaves_it_nothing_to_destroy(library: PlayedNccl) -> None:
    """Such a rank gets None of older torches, and to destroy None is to destroy the default group and all others."""
    library.no_group = None
    start_script()
    library.bound = GPU
    ours = backend_of("nccl")
    for families in ([[0], [1, 2, 3]], [[0], [1], [2, 3]]):
        ours.new_group(families)
    ours.close()
    assert dist.is_initialized()


def test_groups_in_a_script_that_is_bound_to_no_gpu_are_not_split(library: PlayedNccl) -> None:
    """torch refuses to: it cannot know that NCCL is connected yet."""
    start_script()
    backend = backend_of("nccl")
    backend.new_group([[0, 1], [2, 3]])
    assert (library.of("new"), library.of("split")) == ([[0, 1, 2, 3], [0, 1], [2, 3]], [])


# --- and torn down by their owners ---


def groups() -> set[Any]:
    return set(dist.distributed_c10d._world.pg_map)


@pytest.mark.parametrize("name", ["nccl", "gloo"])
def test_close_in_a_script_with_groups_destroys_ours_alone(name: str, library: PlayedNccl) -> None:
    start_script()
    dist.new_group([0, 1], backend="gloo")
    before = groups()
    backend = backend_of(name)
    backend.new_group([[0, 1], [2, 3]])
    assert len(groups()) == len(before) + 2
    backend.close()
    assert groups() == before


@pytest.mark.parametrize("name", ["nccl", "gloo"])
def test_close_leaves_the_groups_that_a_script_has_made_since(name: str, library: PlayedNccl) -> None:
    """And what they rest on."""
    backend = backend_of(name)
    theirs = dist.new_group([0, 1], backend="gloo")
    backend.new_group([[0, 1], [2, 3]])
    backend.close()
    assert groups() == {dist.group.WORLD, theirs}
    dist.destroy_process_group()


def test_close_of_the_connection_that_came_first_leaves_the_second_its_groups(library: PlayedNccl) -> None:
    first, second = backend_of("nccl"), backend_of("gloo")
    second.new_group([[0, 1], [2, 3]])
    first.close()
    assert second.world.handle in groups()
    second.close()
    assert not dist.is_initialized()


def test_close_of_a_connection_leaves_the_default_group_to_the_one_that_uses_it(library: PlayedNccl) -> None:
    first, second = backend_of("nccl"), backend_of("nccl")
    second.close()
    assert dist.is_initialized()
    first.close()
    assert not dist.is_initialized()


def test_abort_ends_only_groups_that_this_rank_is_in(library: PlayedNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch returns a number for the group of other ranks."""
    aborted: list[int] = []
    monkeypatch.setattr(dist.ProcessGroup, "abort", lambda group: aborted.append(group.size()), raising=False)
    backend = backend_of("gloo")
    backend.new_group([[0, 1], [2, 3]])
    backend.abort()
    assert (aborted, dist.is_initialized()) == ([4, 2], False)


# --- NCCL in a run that heals ---


@pytest.fixture
def aborted(monkeypatch: pytest.MonkeyPatch) -> Event:
    """Set once NCCL's groups are aborted."""
    abort, seen = dist.distributed_c10d._abort_process_group, Event()
    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", lambda group: (abort(group), seen.set()))
    return seen


def test_torchs_watchdog_leaves_errors_of_our_groups_alone_to_us(
    library: PlayedNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_DUMP_ON_TIMEOUT", raising=False)
    backend = backend_of("nccl")
    backend.new_group([[0, 1], [2, 3]])
    dist.new_group([0, 1], backend="nccl")
    assert library.of("watchdog") == ["0", "0", "3"]
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT" not in os.environ


def test_abort_in_a_script_with_groups_aborts_ours_alone(library: PlayedNccl, aborted: Event) -> None:
    start_script()
    theirs = dist.new_group([0, 1], backend="gloo")
    backend = backend_of("nccl", heals=True)
    backend.new_group([[0, 1], [2, 3]])
    backend.abort()
    assert aborted.is_set()
    assert groups() == {dist.group.WORLD, theirs}


def test_two_threads_abort_once(library: PlayedNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that waits, and the one of the queue, may both see the error."""
    abort, calls = dist.distributed_c10d._abort_process_group, []

    def slow_abort(group: Any) -> None:
        calls.append(group)
        time.sleep(0.2)
        abort(group)

    monkeypatch.setattr(dist.distributed_c10d, "_abort_process_group", slow_abort)
    made = backend_of("nccl")._groups
    with ThreadPoolExecutor(2) as pool:
        assert [each.result() for each in [pool.submit(made.abort) for _ in range(2)]] == [None, None]
    assert calls == [None]


@pytest.mark.parametrize("has_script", [False, True])
def test_failed_abort_is_told_to_the_caller_who_ends_the_process(
    has_script: bool, library: PlayedNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the remaining ranks would find torch's default group again, and wait in it for the lost one."""
    if has_script:
        start_script()
    backend = backend_of("nccl", heals=True)
    backend.new_group([[0, 1], [2, 3]])
    failing, ended = backend.world.handle, set()

    def abort(group: dist.ProcessGroup) -> None:
        ended.add(group)
        if group is failing:
            raise dist.DistBackendError("NCCL error in: x.cpp:7, unhandled system error")

    monkeypatch.setattr(dist.ProcessGroup, "abort", abort, raising=False)
    monkeypatch.setattr(backend._control, "gather_text", lambda text, what: [text])
    for _ in range(2):  # the thread that waited has aborted already
        with pytest.raises(CommError, match=naming("cannot be aborted", "unhandled system error")):
            backend.abort()
    with pytest.raises(CommError, match="cannot be aborted"):
        backend.restart(num_missed=1)
    assert failing in ended
    dist.destroy_process_group()


def test_wait_for_a_lost_rank_aborts_nccl_before_it_raises(
    library: PlayedNccl, aborted: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then each wait for the GPU may hang: that of a copy of the state, or of memory that is freed."""
    backend = backend_of("nccl", heals=True)

    def give_up(label: str, seconds: float) -> None:
        raise PeerLostError(f"{label}: rank 1 is lost")

    monkeypatch.setattr(backend._control.detector, "raise_if_failed_or_store_lost", give_up)
    work = backend.submit(lambda: assert_set(aborted), label="buffer 1")
    with pytest.raises(PeerLostError, match="buffer 1: rank 1"):
        work.wait()
    assert aborted.is_set()
    assert (dist.is_initialized(), backend.oldest()) == (False, None)
    backend.abort()
    assert not dist.is_initialized()


def assert_set(event: Event) -> None:
    """Hang, as a kernel of NCCL, until the abort."""
    assert event.wait(60)


def test_sum_that_hangs_over_nccl_is_late_and_the_ranks_connect_again(
    library: PlayedNccl, aborted: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung form of the all-reduce is left out (hangs.py); the next groups need other keys in the store."""
    backend = backend_of("nccl")
    backend.new_group([[0, 1], [2, 3]])
    backend.limit(0.05)
    backend.submit(lambda: None, label="buffer 1").wait()
    with monkeypatch.context() as hanging:
        hanging.setattr(torch.Tensor, "copy_", lambda tensor, *_, **__: tensor)  # the GPU comes to nothing
        work = backend.submit(lambda: None, label="buffer 2 by hierarchical")
    with pytest.raises(LateError, match="buffer 2 by hierarchical"):
        work.wait()
    backend.limit(None)
    monkeypatch.setattr(backend._control, "gather_text", lambda text, what: [text])
    backend.restart(num_missed=1)
    assert aborted.is_set()
    assert (backend.oldest(), backend.num_submitted()) == (None, 3)
    former, present = library.of("store")
    former.set("NCCL's unique ID", "of the groups that have ended")
    assert not present.check(["NCCL's unique ID"])
    backend.submit(lambda: None, label="buffer 4").wait()
    backend.close()
    assert not dist.is_initialized()


def test_loss_of_the_store_ends_a_wait_over_nccl(
    library: PlayedNccl, aborted: Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its holder may have died, and NCCL would wait for it; without the store no rank would learn it."""
    monkeypatch.setattr(limits, "STORE_LOST_SECONDS", 0.0)
    hurry_count(monkeypatch)
    backend = backend_of("nccl", heals=True)
    detector = backend._control.detector
    work = backend.submit(lambda: assert_set(aborted), label="buffer 1")
    detector.is_watched = detector.has_lost_store = True
    with pytest.raises(PeerLostError, match=naming("buffer 1", "key-value store")):
        work.wait()
    assert aborted.is_set()
    backend.abort()


def test_error_of_nccl_aborts_it(library: PlayedNccl, aborted: Event, monkeypatch: pytest.MonkeyPatch) -> None:
    hurry_count(monkeypatch)
    backend = backend_of("nccl", heals=True)

    def fail() -> None:
        raise dist.DistBackendError("NCCL error in: x.cpp:7, remote process exited")

    with pytest.raises(PeerLostError, match=naming("rank 0", "buffer 3", "NCCL error", "exited")):
        backend.submit(fail, label="buffer 3").wait()
    assert aborted.is_set()
    backend.abort()


def test_sum_in_a_run_that_heals_is_behind_the_callers_stream_and_on_nccls_own(library: PlayedNccl) -> None:
    backend, streams = backend_of("nccl", heals=True), []
    backend.submit(lambda: streams.append(torch.cuda.current_stream(GPU)), label="buffer").wait()
    (own,) = streams
    assert own.priority == -1
    assert len(own.waited) == 1
    assert own.waited[0] == torch.cuda.current_stream(GPU) != own
    backend.close()
    assert not dist.is_initialized()


# --- what NCCL raises, and what it waits for ---


def test_error_of_the_library_gets_the_jobs_words(library: PlayedNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL raises where an operation is enqueued: in the midst of backward."""
    hurry_count(monkeypatch)
    backend = backend_of("nccl")

    def fail() -> None:
        raise dist.DistBackendError("NCCL error in: x.cpp:7, remote process exited")

    with pytest.raises(PeerLostError, match=naming("rank 0", "buffer 3", "NCCL error", "exited")):
        backend.submit(fail, label="buffer 3")
    assert backend.oldest() is None


def test_last_barrier_is_watched(library: PlayedNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stops the host until the last rank has come, which may never."""
    backend = backend_of("nccl")
    seen: list[str | None] = []

    def wait_for_ever(**_: object) -> None:
        pending = backend.oldest()
        seen.append(pending and pending.label)

    monkeypatch.setattr(dist, "barrier", wait_for_ever)
    backend.close()
    assert seen == ["the last barrier"]


def test_limit_of_nccl_comes_after_the_verdict(library: PlayedNccl) -> None:
    """Its watchdog would end the process before a word is said."""
    took = limits.LOOK_SECONDS + limits.ROLL_CALL_SECONDS + limits.LINGER_SECONDS
    assert backend_of("nccl")._groups.timeout.total_seconds() > 5 + took


def test_rank_that_ends_while_gloo_connects_is_lost_and_leaves_no_default_group(
    library: PlayedNccl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Healing continues from there, and makes another default group."""
    hurry_count(monkeypatch)

    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(dist, "new_group", fail)
    monkeypatch.setattr(TorchDistributedBackend, "_vanished", lambda backend: frozenset({1}))
    with pytest.raises(PeerLostError, match=naming("connection by gloo", "Connection closed by peer")):
        backend_of("gloo")
    assert not dist.is_initialized()
