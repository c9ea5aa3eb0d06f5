"""What comm tune measures: sizes, within the budget, and algorithms that are given up."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from error_texts import naming
from torch import Tensor

from bigbatch.comm.algorithms.hybrid import MeasuredTimes
from bigbatch.comm.connection import connect
from bigbatch.comm.measure import sizes as sizes_module
from bigbatch.comm.measure.sizes import measure_times, sizes_below
from bigbatch.comm.measure.timing import Sums
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import CommError

CPU = torch.device("cpu")


def exact(seconds: float) -> MeasuredTimes:
    return MeasuredTimes((seconds, seconds))


@pytest.mark.parametrize(
    ("num_bytes", "smallest", "largest"),
    [(0, 1024, 1024), (1, 1024, 1024), (1027, 1024, 1024), (8193, 2048, 8192), (10**12, 1024, 256 << 20)],
)
def test_sizes_fall_by_four_from_the_largest(num_bytes: int, smallest: int, largest: int) -> None:
    sizes = sizes_below(num_bytes)
    assert (sizes[0], sizes[-1]) == (smallest, largest)
    assert all(b == pytest.approx(4 * a, abs=32) for a, b in itertools.pairwise(sizes))
    assert all(size % 8 == 0 for size in sizes)


def fake_times(monkeypatch: pytest.MonkeyPatch, seconds_of: Callable[[int], float], *, num_wrong: int = 0) -> list[int]:
    """Measurements that take no time and say what they are told; the sizes that were asked for."""
    asked = []

    def time_sums(tensor_N: Tensor, communicators: Any, *, effort: Any, label: str) -> dict[str, Sums]:
        asked.append(tensor_N.nbytes)
        return {name: Sums(exact(seconds_of(tensor_N.nbytes)), num_wrong) for name in communicators}

    monkeypatch.setattr(sizes_module, "time_sums", time_sums)
    return asked


def test_measure_times_ends_at_a_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_times(monkeypatch, lambda num_bytes: 1.0, num_wrong=3)
    with pytest.raises(CommError, match=naming("native", "3 elements", "1024 bytes", "bigbatch comm bench")):
        measure_times(connect(env=ALONE, device=CPU), [1024], dtype=torch.float32, seconds=1)


def test_measure_times_of_one_rank() -> None:
    alone = connect(env=ALONE, device=CPU)
    times = measure_times(alone, [1024, 4096], dtype=torch.bfloat16, seconds=1.5)
    # where winners differ, which of one rank noise decides, sizes between the two are measured, too
    assert (min(times), max(times)) == (1024, 4096)
    assert all(measured.min > 0 for at_size in times.values() for measured in at_size.values())
