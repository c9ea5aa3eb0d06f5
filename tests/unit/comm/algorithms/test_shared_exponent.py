"""int8 with an exponent for each block, against closed forms."""

import math

import pytest
import torch
from torch import Tensor

from bigbatch.comm.algorithms.shared_exponent import BLOCK, decode, encode_, num_bytes


def there_and_back(values_N: Tensor) -> Tensor:
    coded_C = torch.empty(num_bytes(values_N.numel()), dtype=torch.int8)
    return decode(torch.empty_like(values_N), encode_(coded_C, values_N))


@pytest.mark.parametrize(("values", "expected"), [(1, 2), (32, 33), (33, 35), (64, 66), (0, 0)])
def test_bytes_are_one_for_each_value_and_each_block(values: int, expected: int) -> None:
    assert num_bytes(values) == expected
    assert there_and_back(torch.ones(values)).tolist() == [1.0] * values


@pytest.mark.parametrize("count", [1, 31, 32, 33, 1000])
def test_each_value_is_a_multiple_of_its_blocks_power_of_two(count: int) -> None:
    """The oracle computes in Python's float64, block by block."""
    exponent_N = torch.arange(count).remainder(90) - 60.0
    values_N = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 2.0**exponent_N
    found = there_and_back(values_N).tolist()
    for start in range(0, count, BLOCK):
        block = values_N[start : start + BLOCK].tolist()
        step = 2.0 ** (math.floor(math.log2(max(map(abs, block)))) - 6)
        assert found[start : start + BLOCK] == [max(-127, min(127, round(value / step))) * step for value in block]


def test_encoded_values_stay_as_they_are() -> None:
    once_N = there_and_back(torch.randn(500, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(there_and_back(once_N), once_N)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_its_block_so_and_no_other(value: float) -> None:
    values_N = torch.ones(3 * BLOCK)
    values_N[BLOCK + 5] = value
    values_N[BLOCK + 6] = 0.0
    is_finite_N = there_and_back(values_N).isfinite()
    assert is_finite_N.tolist() == [True] * BLOCK + [False] * BLOCK + [True] * BLOCK


@pytest.mark.parametrize("value", [0.0, 1e-45, 2.0**-127, 2.0**-126, 2.0**-120, 3e38, torch.finfo(torch.float32).max])
def test_smallest_and_largest_values_are_off_by_a_block_step_at_most(value: float) -> None:
    found = there_and_back(torch.full((BLOCK + 1,), value)).tolist()
    assert all(abs(each - value) <= max(value / 128, 2.0**-126) for each in found)
