"""Sums of many sizes by all algorithms: in bounded time, and as a table that noise does not choose."""

import itertools
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_texts import naming
from one_rank import alone

from benchmarks.comm.messages import plan_of
from bigbatch.comm.algorithms.hybrid import MeasuredTimes
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.errors import CommError
from bigbatch.tools.measure.cost_model import MODELS, ClusterModel, LinkModel
from bigbatch.tools.measure.sizes import SumTimes, find_disturbance, make_table, measure_sums, sizes_up_to
from bigbatch.trainer.build.job import fusion_sizes
from bigbatch.trainer.config.file import load_config

SLOW, FAST = MeasuredTimes((2.0, 2.0)), MeasuredTimes((1.0, 1.0))
TIMES = {1024: {"doubling": FAST, "ring": SLOW}, 4_000_000: {"doubling": SLOW, "ring": FAST}}
SECONDS = 10.0
"""Time limit of a measurement."""


@pytest.mark.parametrize(
    ("num_bytes", "smallest", "largest"), [(0, 1024, 1024), (8193, 2048, 8192), (10**12, 1024, 256 << 20)]
)
def test_sizes_fall_by_four_from_the_largest(num_bytes: int, smallest: int, largest: int) -> None:
    sizes = sizes_up_to(num_bytes)
    assert (sizes[0], sizes[-1]) == (smallest, largest)
    assert all(b == pytest.approx(4 * a, abs=32) for a, b in itertools.pairwise(sizes))
    assert all(size % 8 == 0 for size in sizes)


def measure(buffer_bytes: int, *, seconds: float = SECONDS) -> SumTimes:
    """Measure one rank's sums up to this size."""
    start = time.perf_counter()
    return measure_sums(alone(), sizes_up_to(buffer_bytes), dtype=torch.float32, start=start, seconds=seconds)


def naming_all(text: str, *parts: object) -> bool:
    return all(str(part) in text for part in parts)


@pytest.mark.parametrize(
    ("largest", "beyond", "expected"),
    [
        (4_000_000, "native", "doubling up to 64,000 bytes; ring above"),
        (999_999, "ring", "doubling up to 32,000 bytes; ring above"),
        (999_999, "native", "doubling up to 32,000 bytes; ring up to 999,999 bytes; native above"),
    ],
)
def test_measuring_does_not_judge_buffers_by_short_sums(largest: int, beyond: str, expected: str) -> None:
    """Crossings lie at the geometric mean of two sizes, where the ratios of the times are each other's inverse."""
    table = make_table({1024: TIMES[1024], largest: TIMES[4_000_000]}, beyond=beyond)
    assert str(table) == expected


def times_of(*medians: float, spread: float = 0.1, count: int = 8) -> dict[int, dict[str, MeasuredTimes]]:
    """Times of the fastest at sizes four times each other, whose quartiles lie that share of the median apart."""
    swings = [spread / 2 * (-1) ** i for i in range(count)]
    slow = MeasuredTimes((99.0, 99.0))
    return {
        1024 * 4**i: {"ring": MeasuredTimes(tuple(median * (1 + each) for each in swings)), "doubling": slow}
        for i, median in enumerate(medians)
    }


@pytest.mark.parametrize(
    ("times", "told"),
    [
        ({}, ()),
        (times_of(1.0, 1.2, 1.1, 3.0), ()),
        (times_of(1.9, 1.0, 1.0, 3.0), ()),
        (times_of(1.0e-3, 1.1e-3, 93.1e-3, 1.6e-3), ("93.1 ms for 16,384 bytes", "1.6 ms for 65,536")),
        (times_of(93.1e-3, 1.6e-3, count=2), ()),  # two times may have met one hiccup
        (times_of(1.0, 2.0, 3.0, spread=0.45), ()),
        (times_of(1.0, 2.0, 3.0, spread=0.6), ("4,096 bytes", "60%")),
        (times_of(1.0, 2.0, 3.0) | {4: times_of(1.0, spread=0.9)[1024]}, ()),  # one of several sizes
    ],
)
def test_measuring_tells_times_that_other_work_disturbed(times: Any, told: tuple[str, ...]) -> None:
    found = find_disturbance(times)
    assert bool(found) == bool(told)
    assert naming_all(found, *told)


def test_measuring_keeps_the_default_on_a_busy_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sum may lose its core for 30 ms, three of seven times: a host with more busy processes than cores."""
    draw = random.Random(0)

    def seconds_of(algorithm: str, num_bytes: int) -> float:
        return (1e-3 if algorithm == "doubling" else 1.2e-3) + num_bytes * 1e-9 + 0.03 * (draw.random() < 3 / 7)

    play(monkeypatch, seconds_of, gather=0.0)
    found = measure(LARGEST, seconds=2.0)
    assert str(found.table) == "native at any size"  # of one rank
    assert found.disturbance


def test_measuring_ends_where_a_sum_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def sum_(self: Communicator, tensor_N: torch.Tensor, *, label: str) -> torch.Tensor:
        return tensor_N.add_(1)

    monkeypatch.setattr(Communicator, "sum_", sum_)
    with pytest.raises(CommError, match=naming("native", " bytes", "bigbatch comm bench")):
        measure(4096)


def play(monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[str, int], float], *, gather: float) -> list[float]:
    """A clock, in a list, that sums by an algorithm of so many bytes and words between ranks move on, nothing else."""
    now = [0.0]

    def sum_(self: Communicator, tensor_N: torch.Tensor, *, label: str) -> torch.Tensor:
        now[0] += seconds_of(self.algorithm, tensor_N.nbytes)
        return tensor_N

    def after_words(words: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def slow(*args: Any, **kwargs: Any) -> list[str]:
            now[0] += gather
            return words(*args, **kwargs)

        return slow

    monkeypatch.setattr(Communicator, "sum_", sum_)
    for name in ("gather_text", "collect_text"):
        monkeypatch.setattr(JobControl, name, after_words(getattr(JobControl, name)))
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_measuring_of_2048_ranks_covers_the_buffers_of_imagenet(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 nodes of 8, by the cost model: 30 us and 100 Gbit/s between nodes; native as slow as a ring over all."""
    cluster = ClusterModel((8,) * 256, inside=LinkModel(10e-6, 1e10), across=LinkModel(30e-6, 12.5e9))

    def seconds_of(algorithm: str, num_bytes: int) -> float:
        return MODELS[algorithm if algorithm in MODELS else "ring"](num_bytes, cluster)

    now = play(monkeypatch, seconds_of, gather=0.2)
    config = load_config(["--config", "imagenet/resnet50_8k"])
    found = measure(fusion_sizes(config).buffer_bytes)
    assert now[0] <= SECONDS
    measured = {size: set(at) for size, at in found.times.items()}
    buffers = [buffer.num_bytes for buffer in plan_of("imagenet/resnet50_8k")]
    assert sum(buffers) > 50e6
    covered = [size for size in buffers if min(measured) <= size <= max(measured)]
    assert sum(covered) >= 0.99 * sum(buffers)
    one = alone()
    swept = [size for size in sizes_up_to(fusion_sizes(config).buffer_bytes) if size in measured]
    assert all(measured[size] == set(one.transport.algorithms) for size in swept)
    for size in covered:  # the closed forms say which is the fastest there
        best = min(seconds_of(name, size) for name in MODELS)
        assert seconds_of(found.table.choose(size), size) <= 1.05 * best


LARGEST = 4_000_000


@pytest.mark.parametrize("gather_seconds", [0.0, 0.4, 1.6])
@pytest.mark.parametrize("seconds_per_mb", [1e-3, 0.5, 20.0])
def test_measuring_keeps_to_its_time(
    seconds_per_mb: float, gather_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds_of(algorithm: str, num_bytes: int) -> float:
        latency, share = (1e-3, 2.0) if algorithm == "doubling" else (3e-3, 1.0)
        return latency + share * seconds_per_mb * num_bytes / 1e6

    now = play(monkeypatch, seconds_of, gather=gather_seconds)
    found = measure(LARGEST)
    assert now[0] <= SECONDS
    sizes = list(found.times)
    if not sizes:
        assert (gather_seconds >= 0.6, str(found.table)) == (True, "native at any size")
        return
    if seconds_per_mb <= 1e-3 and gather_seconds <= 0.6:  # what counts for gradients comes first
        assert max(sizes) > 1_000_000
    if max(sizes) < 1_000_000:
        assert found.table.choose(25_000_000) == "native"  # of one rank
