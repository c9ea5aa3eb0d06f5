"""Numbers on a grid: their sums against Python's whole numbers and fractions, which neither round nor overflow."""

import math
from fractions import Fraction
from itertools import permutations

import pytest
import torch

from bigbatch.comm.gradients.grid import Grid

STEP = Fraction(1, 2**50)


def summed(grid: Grid, *terms: torch.Tensor) -> torch.Tensor:
    sums_N = torch.zeros(terms[0].numel() + 1, dtype=torch.int64)
    for term_N in terms:
        grid.add_(sums_N, term_N)
    total_N = torch.empty_like(terms[0])
    grid.read_(total_N, sums_N)
    return total_N


def random_terms(count: int, *, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    magnitudes = (torch.exp2(torch.rand(1000, generator=generator) * 45 - 40) for _ in range(count))
    return [(each * torch.randn(1000, generator=generator)).clamp_(-60, 60).to(dtype) for each in magnitudes]


def nearest_fp32(number: Fraction) -> float:
    if not number:
        return 0.0
    digits = Fraction(2) ** (math.floor(math.log2(abs(number))) - 23)
    return float(round(number / digits) * digits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grid_rounds_each_term_to_it_and_the_sum_to_its_dtype(dtype: torch.dtype) -> None:
    terms = random_terms(3, dtype=dtype)
    found = summed(Grid(3), *terms)
    for place, columns in enumerate(zip(*(term.double().tolist() for term in terms), strict=True)):
        steps = sum(round(Fraction(number) / STEP) for number in columns)  # a half to the even one, as torch does
        assert found[place].item() == torch.tensor(nearest_fp32(steps * STEP)).to(dtype).item()


def test_grid_sums_have_the_same_bits_in_any_order() -> None:
    terms = random_terms(4)
    found = [summed(Grid(4), *order) for order in permutations(terms)]
    assert all(torch.equal(each, found[0]) for each in found)
    plain = [sum(order[1:], order[0]) for order in permutations(terms)]
    assert not all(torch.equal(each, plain[0]) for each in plain), "what fp32 does"


@pytest.mark.parametrize("num_terms", [1, 3, 8192])
def test_grid_holds_the_largest_terms(num_terms: int) -> None:
    grid = Grid(num_terms)
    assert grid.largest == pytest.approx(4096 / num_terms)
    term_1 = torch.tensor([grid.largest * (1 - 2.0**-23)])
    sums_2 = torch.zeros(2, dtype=torch.int64)
    grid.add_(sums_2, term_1)
    sums_2 *= num_terms  # as if all were as large
    total_1 = torch.empty(1)
    grid.read_(total_1, sums_2)
    assert total_1.item() == pytest.approx(num_terms * term_1.item())


@pytest.mark.parametrize("number", [5000.0, -5000.0, math.inf, -math.inf, math.nan])
def test_grid_gives_infinity_for_what_lies_beyond(number: float) -> None:
    """Everywhere, as one number of a gradient that is not finite ends the step for all of it."""
    assert summed(Grid(2), torch.tensor([1.0, number]), torch.ones(2)).tolist() == [math.inf] * 2
    assert summed(Grid(2), torch.ones(2), torch.ones(2)).tolist() == [2.0, 2.0]


def test_grid_counts_what_it_takes_for_zero() -> None:
    """Up to half a step, as a half goes to the even one; what lies beyond is not underflow."""
    term_N = torch.tensor([0.0, 2.0**-51, -(2.0**-60), 2.0**-51 * 1.5, 1.0, math.inf, math.nan, -1e9])
    counts_2 = torch.tensor([10, 100])
    Grid(1).add_(torch.zeros(9, dtype=torch.int64), term_N, counts_2=counts_2)
    assert counts_2.tolist() == [12, 107]


def test_grid_without_room_is_refused() -> None:
    Grid(2, fraction_bits=61)
    for grid in ((0, 50), (2**62 + 1, 10)):
        with pytest.raises(ValueError, match="no room for sums"):
            Grid(*grid)


def test_grid_has_the_same_sums_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    """And counts what is beyond it in one of them."""
    terms = random_terms(3)
    whole_N = summed(Grid(3), *terms)
    monkeypatch.setattr("bigbatch.comm.gradients.grid.CPU_PORTION", 300)
    assert torch.equal(summed(Grid(3), *terms), whole_N)
    sums_N = torch.zeros(1001, dtype=torch.int64)
    terms[0][[5, 700, 701]] = torch.tensor([math.inf, math.nan, -1e9])
    Grid(3).add_(sums_N, terms[0])
    assert sums_N[-1] == 3
    assert sums_N[[5, 700, 701]].tolist() == [0, 0, 0]
    assert (sums_N[:-1] != 0).sum() == 997
