"""Exposed communication in closed form, and the search against all plans there are."""

import itertools
import random

import pytest
from error_texts import naming

from bigbatch.comm.gradients.fusion import PlanSizes, TensorSpec
from bigbatch.tools.measure.cost_model import Backward
from bigbatch.tools.simulate.plan_search import (
    MIN_GAIN,
    exposed_seconds,
    schedule_transfers,
    search_plan,
)


def specs(*sizes: int) -> list[TensorSpec]:
    """Gradients of so many bytes, named by their place."""
    return [TensorSpec(str(i), size // 4, 4, "float32") for i, size in enumerate(sizes)]


def backward(*ready: float, seconds: float | None = None) -> Backward:
    """Ready times of the gradients of specs()."""
    return Backward({str(i): t for i, t in enumerate(ready)}, max(ready) if seconds is None else seconds)


def one_each(tensors: list[TensorSpec]) -> PlanSizes:
    """Every gradient in a buffer of its own."""
    return PlanSizes(max(t.num_bytes for t in tensors), min(t.num_bytes for t in tensors))


def test_plan_has_transfers_wait_for_gradients_and_each_other() -> None:
    tensors = specs(400, 400, 400)
    plan = one_each(tensors).plan(tensors)
    transfers = schedule_transfers(plan, backward(1.0, 2.0, 9.0), lambda n: n / 100)
    assert [(t.ready_seconds, t.start_seconds, t.end_seconds) for t in transfers] == [(1, 1, 5), (2, 5, 9), (9, 9, 13)]
    assert [t.num_bytes for t in transfers] == [400, 400, 400]


@pytest.mark.parametrize("bytes_per_second", [1000, 4000, 100_000])
def test_plan_of_equal_gradients_at_an_even_pace(bytes_per_second: int) -> None:
    """n gradients, one every d seconds, t to send one: exposed t where t <= d, else n * t - (n - 1) * d."""
    n, size, d = 10, 1000, 0.25
    tensors = specs(*[size] * n)
    t = size / bytes_per_second
    expected = t if t <= d else n * t - (n - 1) * d
    times = backward(*[d * (i + 1) for i in range(n)])
    got = exposed_seconds(one_each(tensors).plan(tensors), times, lambda num_bytes: num_bytes / bytes_per_second)
    assert got == pytest.approx(expected, rel=1e-12)


def test_plan_exposes_nothing_that_backward_hides() -> None:
    tensors = specs(400, 400)
    plan = one_each(tensors).plan(tensors)
    assert exposed_seconds(plan, backward(1.0, 2.0, seconds=50.0), lambda n: 1.0) == 0.0
    assert exposed_seconds(PlanSizes(1, 1).plan([]), Backward({}, 1.0), lambda n: 1.0) == 0.0


def random_case(seed: int, *, count: int) -> tuple[list[TensorSpec], Backward, float, float]:
    """Gradients, their times, latency and seconds per byte; communication takes about as long as backward."""
    draw = random.Random(seed)
    tensors = specs(*(4 * draw.choice((1, 10, 25, 100, 250)) for _ in range(count)))
    times = sorted(draw.uniform(0, 1) for _ in range(count))
    latency = draw.choice((0.0, 0.02, 0.2))
    return tensors, backward(*times), latency, draw.choice((0.3, 1.0, 2.0)) / sum(t.num_bytes for t in tensors)


@pytest.mark.parametrize("seed", range(3))
def test_search_finds_the_best_of_all_sizes(seed: int) -> None:
    """Brute force over every threshold, buffer and first buffer from 4 bytes to the sum of all, in steps of 4."""
    tensors, times, a, b = random_case(seed, count=5)

    def seconds_of(num_bytes: int) -> float:
        return a + num_bytes * b

    total = sum(t.num_bytes for t in tensors)
    sums = {sum(t.num_bytes for t in tensors[i:j]) for i in range(5) for j in range(i + 1, 6)}
    tried = sorted({4, total} | sums | {s - 4 for s in sums if s > 4} | {s + 4 for s in sums})
    best = min(
        exposed_seconds(PlanSizes(threshold, buffer, first).plan(tensors), times, seconds_of)
        for threshold, buffer, first in itertools.product(tried, tried, [None, *tried])
    )
    choice = search_plan(tensors, times, seconds_of)
    assert best - 1e-12 <= choice.exposed_seconds <= best + MIN_GAIN * (times.seconds + best) + 1e-12
    assert exposed_seconds(choice.sizes.plan(tensors), times, seconds_of) == choice.exposed_seconds


def test_search_takes_more_buffers_only_where_worth_it() -> None:
    """Halving the last buffer saves 0.5 ms: of a backward of 0.1 s that is worth a buffer, of one of 1 s it is not."""
    tensors = specs(4000, 4000)
    for seconds, count in ((0.1, 2), (1.0, 1)):
        times = backward(seconds / 2, seconds)
        assert len(search_plan(tensors, times, lambda n: n / 8000 * 1e-3).plan.buffers) == count
    # nor where a second of communication is exposed anyway
    assert len(search_plan(tensors, backward(5e-4, 1e-3), lambda n: n / 8000).plan.buffers) == 1


def test_search_asks_once_for_the_time_of_each_size() -> None:
    tensors, times, *_ = random_case(0, count=5)
    asked: list[int] = []
    search_plan(tensors, times, lambda num_bytes: asked.append(num_bytes) or 0.1)  # type: ignore[func-returns-value]
    assert len(asked) == len({*asked}) > 5


def test_search_with_nothing_to_plan_for() -> None:
    with pytest.raises(ValueError, match=naming("no gradient")):
        search_plan([], Backward({}, 1.0), lambda n: 1.0)
