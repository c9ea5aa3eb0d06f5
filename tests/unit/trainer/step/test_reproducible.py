"""Norms of tensors in pieces: the same bits by any cut, near to the norm of Python's fractions."""

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from bigbatch.trainer.step.reproducible import exact_norms

MAX_ELEMENTS = 2**22 - 1


def norms_by_ranks(tensors: list[Tensor], *, cuts: list[int]) -> Tensor:
    """Return the norms of ranks that each hold the tensors from one of these places to the next."""
    shares = [[tensor[low:high] for tensor in tensors] for low, high in zip([0, *cuts], [*cuts, None], strict=True)]
    said: dict[str, list[Tensor]] = {"maxima": [], "sums": []}

    def hear(what: str, own_N: Tensor) -> Tensor:
        said[what].append(own_N)
        return own_N

    def ask(share: list[Tensor], together: dict[str, Tensor] | None = None) -> Tensor:
        return exact_norms(
            share,
            max_elements=MAX_ELEMENTS,
            all_maxima=lambda own_N: hear("maxima", own_N) if together is None else together["maxima"],
            all_sums=lambda own_N: (
                hear("sums", own_N) if together is None or "sums" not in together else together["sums"]
            ),
        )

    for share in shares:
        ask(share)
    maxima_N = torch.stack(said["maxima"]).amax(dim=0)
    said["sums"].clear()
    for share in shares:
        ask(share, {"maxima": maxima_N})
    sums_N = torch.stack(said["sums"]).sum(dim=0)
    found = [ask(share, {"maxima": maxima_N, "sums": sums_N}) for share in shares]
    assert all(torch.equal(each.view(torch.int32), found[0].view(torch.int32)) for each in found)
    return found[0]


def drawn(*, exponent: float, count: int = 5000) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, generator=generator) * 2.0**exponent


def fraction_norm(tensor: Tensor) -> float:
    return math.sqrt(sum((Fraction(number) ** 2 for number in tensor.tolist()), Fraction(0)))


@pytest.mark.parametrize("exponent", [-140, -100, -20, 0, 60])
def test_norms_have_the_same_bits_by_any_cut_and_are_those_of_fractions(exponent: float) -> None:
    tensors = [drawn(exponent=exponent), drawn(exponent=exponent)[:3], torch.zeros(7)]
    whole_N = norms_by_ranks(tensors, cuts=[])
    for cuts in ([1], [2, 3, 64], [1000, 2500, 2501, 4999], [0, 5000]):
        assert torch.equal(norms_by_ranks(tensors, cuts=cuts), whole_N)
    expected = [fraction_norm(tensor) for tensor in tensors]
    # half an ulp of fp32, which is 2**-150 for the least of them
    torch.testing.assert_close(whole_N, torch.tensor(expected), rtol=2**-23, atol=2**-149)


def test_norms_of_pieces_that_round_depend_on_the_cut() -> None:
    """What the test above would say of squares that add up in floating point, as an update without a grid has it."""
    tensor = drawn(exponent=0)

    def by_squares(cuts: list[int]) -> float:
        pieces = [tensor[low:high] for low, high in zip([0, *cuts], [*cuts, None], strict=True)]
        return float(sum(torch.linalg.vector_norm(piece).double() ** 2 for piece in pieces))

    assert len({by_squares([k]) for k in range(1, 100)}) > 1


def test_a_large_number_among_small_ones_costs_them_no_more_than_is_said() -> None:
    """All squares are off the same way, by nearly half a step: the worst that there is."""
    step = 2.0**-40
    tensor = torch.full((100_000,), math.sqrt(0.49 * step))
    tensor[0] = 1.0
    (found,) = norms_by_ranks([tensor], cuts=[5]).tolist()
    rounding = 2**-23  # of the norm to fp32
    assert abs(found**2 - fraction_norm(tensor) ** 2) <= 100_000 * step / 2 + rounding
    many = torch.full((2_000_000,), math.sqrt(0.51 * step))  # above half a step none is lost
    many[0] = 1.0
    (found,) = norms_by_ranks([many], cuts=[5]).tolist()
    assert found**2 == pytest.approx(1 + 2_000_000 * step, abs=rounding)


@pytest.mark.parametrize("odd", [math.inf, -math.inf, math.nan])
def test_a_number_that_is_not_finite_makes_its_norm_infinite_on_all_ranks(odd: float) -> None:
    tensors = [drawn(exponent=0), drawn(exponent=0)]
    tensors[1][3] = odd
    found = norms_by_ranks(tensors, cuts=[1000, 2000]).tolist()
    assert found[0] == pytest.approx(fraction_norm(tensors[0]))
    assert found[1] == math.inf


def test_the_largest_numbers_and_a_norm_beyond_fp32() -> None:
    largest = torch.finfo(torch.float32).max
    assert norms_by_ranks([torch.tensor([largest])], cuts=[0]).tolist() == [largest]
    assert norms_by_ranks([torch.full((4,), largest)], cuts=[1]).tolist() == [math.inf]
