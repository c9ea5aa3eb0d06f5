"""Sums of a GPU's tensors: whatever their order on the device depends on is waited for, and nothing else is."""

from collections.abc import Iterator
from concurrent import futures
from threading import current_thread
from typing import Any

import pytest
import torch
from recorded_gpu import GPU, RecordedGpu, RecordedStream
from recorded_ranks import first_rank
from stream_order import require_every_wait
from torch import Tensor, nn

from bigbatch.comm.backends.host_staging import HostStaging
from bigbatch.comm.backends.in_flight import StreamQueue
from bigbatch.comm.backends.node_memory import SMALLEST_SCRATCH_BYTES
from bigbatch.comm.gradients.exposed_time import ExposedTime
from bigbatch.comm.gradients.group_gather import make_group_gather
from bigbatch.comm.gradients.reducer import GradientReducer

LIBRARIES = ("nccl", "gloo")
"""gloo: by way of the host."""


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedGpu]:
    played = RecordedGpu(monkeypatch)
    with played.running():
        yield played


@pytest.mark.parametrize(
    ("library", "algorithm"), [("nccl", "native"), ("nccl", "sharded"), ("nccl", "doubling"), ("gloo", "doubling")]
)
def test_reducer_waits_for_what_it_must(gpu: RecordedGpu, library: str, algorithm: str) -> None:
    with first_rank(algorithm=algorithm, library=library) as communicator:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(GPU)
        sizes = {"threshold_bytes": 32, "buffer_bytes": 32}
        reducer = GradientReducer(model.named_parameters(), communicator, **sizes, learn_order=False)
        assert len(reducer.buffers) > 2
        gpu.trace.judge_from_here()
        for _ in range(2):
            reducer.zero_grad()
            model(torch.ones(2, 4, device=GPU)).sum().backward()
            reducer.wait()
            for parameter in model.parameters():
                parameter.data.add_(parameter.grad)
            assert reducer.exposed.take_seconds() > 0
        require_every_wait(gpu.trace)


@pytest.mark.parametrize("num_buffers", [1, 3])
@pytest.mark.parametrize("heals", [False, True])
def test_host_waits_once_per_step_over_nccl_if_the_run_heals(
    heals: bool, num_buffers: int, gpu: RecordedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the last sum, whatever the number of buffers; the other thread waits for each of them and the extra one."""
    futures_waited: set[int] = set()
    threads: list[str] = []
    wait, synchronize, held = futures.wait, RecordedStream.synchronize, []

    def count_wait(waited: list[futures.Future[None]], timeout: float) -> Any:
        held.extend(waited)  # so that no identity is used twice
        futures_waited.add(id(waited[0]))
        return wait(waited, timeout=timeout)

    def count_synchronize(stream: RecordedStream) -> None:
        threads.append(current_thread().name)
        synchronize(stream)

    with first_rank(algorithm="native", heals=heals) as communicator:
        model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(num_buffers))).to(GPU)
        sizes = {"threshold_bytes": 16, "buffer_bytes": 16}
        reducer = GradientReducer(model.named_parameters(), communicator, **sizes, learn_order=False)
        statistics_N = torch.ones(3, device=GPU)
        monkeypatch.setattr(futures, "wait", count_wait)
        monkeypatch.setattr(RecordedStream, "synchronize", count_synchronize)
        num_steps = 2
        for _ in range(num_steps):
            reducer.zero_grad()
            outputs = model(torch.ones(2, 2, device=GPU))
            reducer.start_extra(statistics_N, label="all-reduce of statistics")
            outputs.sum().backward()
            reducer.wait()
        assert len(reducer.buffers) == num_buffers
        assert len(futures_waited) == num_steps * heals
        assert threads == ["bigbatch-comm"] * (num_steps * (num_buffers + 1) * heals)


@pytest.mark.parametrize("library", LIBRARIES)
def test_gather_of_a_group_waits_for_what_it_must(gpu: RecordedGpu, library: str) -> None:
    with first_rank(algorithm="native", library=library) as communicator:
        gather = make_group_gather(communicator.transport, group_size=2, exposed=ExposedTime(), what="statistics")
        gpu.trace.judge_from_here()
        for _ in range(2):
            own_N = torch.ones(3, device=GPU)
            all_RN = gather(own_N.mul_(2))
            assert all_RN.shape == (2, 3)
            own_N.copy_(all_RN.sum(0))
        require_every_wait(gpu.trace)


def test_sum_by_way_of_the_host_waits_for_what_it_must_where_its_scratch_grows(gpu: RecordedGpu) -> None:
    with first_rank(algorithm="native", library="gloo") as communicator:
        gpu.trace.judge_from_here()
        for num_elements in (4, SMALLEST_SCRATCH_BYTES // 2, SMALLEST_SCRATCH_BYTES):
            own_N = torch.ones(num_elements, device=GPU)
            work = communicator.start(own_N.mul_(2), label="a sum")
            work.wait()
            own_N.mul_(2)
            assert len(gpu._pinned) == 1, "what is outgrown is given back"
        assert gpu.trace.objections() == []


# --- the recorder is not blind ---


def test_order_of_two_streams_is_seen(gpu: RecordedGpu) -> None:
    side, tensor_N = torch.cuda.Stream(GPU), torch.zeros(3, device=GPU)
    with torch.cuda.stream(side):
        tensor_N.add_(1)
    assert len(gpu.trace.objections()) == 1


def test_memory_that_another_stream_still_reads_is_seen(gpu: RecordedGpu) -> None:
    """torch gives what is freed to the next allocation on the stream that had made it."""
    kept, queue = [torch.zeros(3, device=GPU)], StreamQueue(GPU)
    queue.submit(lambda: torch.zeros(3, device=GPU).copy_(kept[0]), label="copy")
    kept.clear()
    assert gpu.trace.objections() == []
    torch.zeros(3, device=GPU)
    assert "an allocation for" in gpu.trace.objections()[0]


def test_a_host_that_reads_or_writes_too_early_is_seen(gpu: RecordedGpu) -> None:
    host_N = torch.zeros(3, pin_memory=True)
    device_N = host_N.to(GPU, non_blocking=True)
    assert gpu.trace.objections() == []
    host_N.add_(1)
    assert "add_" in gpu.trace.objections()[0]
    host_N.copy_(device_N)
    assert len(gpu.trace.objections()) == 1  # which waits by itself


def test_a_mark_behind_what_another_thread_may_not_have_launched_is_seen(gpu: RecordedGpu) -> None:
    """Such as a wait on the device that comes before the one on the host."""
    with first_rank(algorithm="native", library="gloo") as communicator:
        gpu.trace.judge_from_here()
        staging, device_N = HostStaging(GPU), torch.zeros(3, device=GPU)
        host_N: Tensor = torch.zeros(3, pin_memory=True)
        work = communicator.transport.backend.submit(lambda: staging.copy_back(device_N, host_N), label="copy")
        work.wait()
        staging.join()
        device_N.add_(1)
        (on_host, on_device) = gpu.trace.waits()
        assert all(gpu.trace.objections(without=each) for each in (on_host, on_device))
