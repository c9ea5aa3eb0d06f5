"""Gradients of weights on a second stream: each wait of a prototype is needed, by a GPU that is played."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from recorded_gpu import GPU, RecordedGpu
from stream_order import require_every_wait

from benchmarks.gpu.prototypes.weight_gradients import Block, SecondStream, random_block


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedGpu]:
    played = RecordedGpu(monkeypatch)
    with played.running():
        yield played


def small_block() -> Block:
    return random_block(2, 3, 2, dtype=torch.float32, device=GPU)


def test_second_stream_waits_for_what_it_must(gpu: RecordedGpu) -> None:
    block, stream = small_block(), SecondStream(GPU)
    gpu.trace.judge_from_here()
    for _ in range(2):
        found = block.backward(stream.start)
        stream.join()
        for gradient in found.values():
            gradient.mul_(2)
        del found
    require_every_wait(gpu.trace)


@pytest.mark.parametrize("forgotten", ["memory", "join"])
def test_order_that_is_wrong_is_seen(gpu: RecordedGpu, forgotten: str) -> None:
    block, stream = small_block(), SecondStream(GPU)

    def start(work: Any) -> torch.Tensor:
        result = stream.start(work)
        if forgotten == "memory":
            stream._work.clear()
        return result

    found = block.backward(start)
    if forgotten == "memory":
        stream.join()
    for gradient in found.values():
        gradient.mul_(2)
    objections = gpu.trace.objections()
    assert objections
    assert all(("an allocation for" in each) is (forgotten == "memory") for each in objections)
