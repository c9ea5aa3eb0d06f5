"""What comm tune measures: sizes, within the budget, and algorithms that are given up."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_texts import naming
from torch import Tensor

from bigbatch.comm.algorithms.hybrid import Measured
from bigbatch.comm.connection import connect
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.tuning import sweep
from bigbatch.comm.tuning.measure import Sums
from bigbatch.comm.tuning.sweep import measure_times, tune_sizes
from bigbatch.errors import CommError

CPU = torch.device("cpu")


def exact(seconds: float) -> Measured:
    """A time without noise."""
    return Measured((seconds, seconds))


@pytest.mark.parametrize(
    ("before", "last", "left"),
    [
        # bytes count (the best took 4 times as long): b fell back further
        ({"a": 1.0, "b": 2.0}, {"a": 4.0, "b": 9.0}, ["a"]),
        ({"a": 1.0, "b": 1.06}, {"a": 4.0, "b": 4.3}, ["a"]),
        ({"a": 1.0, "b": 1.04}, {"a": 4.0, "b": 9.0}, ["a", "b"]),  # but was near at the size before
        ({"a": 1.0, "b": 9.0}, {"a": 4.0, "b": 9.0}, ["a", "b"]),  # slow for its latency: it catches up
        ({"a": 1.0, "b": 2.0}, {"a": 2.0, "b": 9.0}, ["a", "b"]),  # latency counts still
        ({"a": 9.0, "b": 1.0}, {"a": 9.0, "b": 3.0}, ["a", "b"]),  # the best one changes
    ],
)
def test_survivors_and_who_is_given_up(before: dict[str, float], last: dict[str, float], left: list[str]) -> None:
    times = {size: {n: exact(s) for n, s in at.items()} for size, at in ((1024, before), (4096, last))}
    assert sweep.survivors(times, ["a", "b"]) == left
    assert sweep.survivors({1024: times[1024]}, ["a", "b"]) == ["a", "b"]


def test_survivors_hold_who_seems_behind_by_noise() -> None:
    """1.07 times the best's median, give or take: quartiles 0.5 apart of 2 make that uncertain by far more."""
    noisy = Measured((4.0, 4.28, 4.6))
    times = {1024: {"a": exact(1.0), "b": exact(1.06)}, 4096: {"a": exact(4.0), "b": noisy}}
    assert sweep.survivors(times, ["a", "b"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("gradient_bytes", "largest"),
    [(0, 1024), (1, 1024), (1024, 1024), (1025, 2048), (8193, 9216), (102_228_128, 102_228_992), (10**12, 256 << 20)],
)
def test_sizes_reach_to_all_gradients_in_one(gradient_bytes: int, largest: int) -> None:
    sizes = tune_sizes(gradient_bytes)
    assert (sizes[0], sizes[-1]) == (1024, largest)
    assert all(b == 4 * a for a, b in itertools.pairwise(sizes[:-1]))
    assert all(2 <= b / a <= 8 for a, b in itertools.pairwise(sizes))


def fake_times(monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[int], float], *, num_wrong: int = 0) -> list[int]:
    """Measurements that take no time and say what they are told; the sizes that were asked for."""
    asked = []

    def time_sums(tensor_N: Tensor, communicators: Any, *, effort: Any, label: str) -> dict[str, Sums]:
        asked.append(tensor_N.nbytes)
        return {name: Sums(exact(seconds_of(tensor_N.nbytes)), num_wrong) for name in communicators}

    monkeypatch.setattr(sweep, "time_sums", time_sums)
    return asked


@pytest.mark.parametrize(("seconds", "largest"), [(1e9, 4**10), (6.0, 4**8), (1e-9, 4**5)])
def test_sizes_that_would_exceed_the_budget_are_left_out(
    seconds: float, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the algorithms takes a second per MiB: 4**9 would take 3 * 0.25 s of each, 4**10 3 s."""
    asked = fake_times(monkeypatch, lambda num_bytes: num_bytes / 2**20)
    alone = connect(env=ALONE, device=CPU)
    heard: list[int] = []
    sizes = tune_sizes(4**10)
    per_algorithm = 3 * 0.25
    budget = seconds if seconds != 6.0 else per_algorithm * len(alone.algorithms) * 0.9
    times = measure_times(
        alone, sizes, dtype=torch.float16, seconds=budget, on_size=lambda size, at_size: heard.append(size)
    )
    assert asked == heard == sorted(times) == [size for size in sizes if size <= largest]
    assert set(times[1024]) == set(alone.algorithms)


def test_measure_times_ends_at_a_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, lambda num_bytes: 1.0, num_wrong=3)
    with pytest.raises(CommError, match=naming("native", "3 elements", "1024 bytes", "bigbatch comm bench")):
        measure_times(connect(env=ALONE, device=CPU), [1024], dtype=torch.float32, seconds=1, on_size=lambda *_: None)


def test_measure_times_of_one_rank() -> None:
    alone = connect(env=ALONE, device=CPU)
    times = measure_times(alone, [1024, 4096], dtype=torch.bfloat16, seconds=60, on_size=lambda *_: None)
    # where winners differ, which of one rank noise decides, sizes between the two are measured, too
    assert (min(times), max(times)) == (1024, 4096)
    assert all(measured.min > 0 for at_size in times.values() for measured in at_size.values())
