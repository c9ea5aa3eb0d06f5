"""Half-precision gradients of many microbatches, against their float64 sum."""

from collections.abc import Sequence

import pytest
import torch
from one_rank import alone
from torch import Tensor, nn

from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.trainer.step.accumulation import WideAccumulation, half_parameters

HALF = [torch.float16, torch.bfloat16]
NUM_WEIGHTS = 5000


def make_gradients(count: int, dtype: torch.dtype) -> list[Tensor]:
    """One per microbatch: noise about a mean, as gradients are."""
    generator = torch.Generator().manual_seed(count)
    mean_N = torch.randn(NUM_WEIGHTS, generator=generator)
    return [(mean_N + torch.randn(NUM_WEIGHTS, generator=generator)).to(dtype) for _ in range(count)]


def backward(weight: nn.Parameter, gradient_N: Tensor) -> None:
    (weight * gradient_N).sum().backward()


def accumulated(gradients: Sequence[Tensor]) -> Tensor:
    """What the weight's gradient is after a step of so many microbatches."""
    weight = nn.Parameter(torch.zeros_like(gradients[0]))
    accumulation = WideAccumulation([weight])
    for k, gradient_N in enumerate(gradients):
        with accumulation.microbatch(is_last=k == len(gradients) - 1):
            backward(weight, gradient_N)
    assert weight.grad is not None
    assert weight.grad.dtype == gradients[0].dtype
    return weight.grad


def plainly_accumulated(gradients: Sequence[Tensor]) -> Tensor:
    """The same by autograd alone."""
    weight = nn.Parameter(torch.zeros_like(gradients[0]))
    for gradient_N in gradients:
        backward(weight, gradient_N)
    assert weight.grad is not None
    return weight.grad


def relative_error(sum_N: Tensor, gradients: Sequence[Tensor]) -> float:
    exact_N = torch.stack(list(gradients)).double().sum(0)
    return float((sum_N.double() - exact_N).norm() / exact_N.norm())


def summed_over_ranks(gradients: Sequence[Tensor]) -> Tensor:
    """What as many ranks would hold, each with one microbatch, by an all-reduce that adds in fp32 (tcp, mpi)."""
    return torch.stack(list(gradients)).float().sum(0).to(gradients[0].dtype)


@pytest.mark.parametrize("dtype", HALF)
def test_accumulation_of_256_microbatches_loses_no_more_than_256_ranks(dtype: torch.dtype) -> None:
    gradients = make_gradients(256, dtype)
    ours = relative_error(accumulated(gradients), gradients)
    assert ours <= 1.01 * relative_error(summed_over_ranks(gradients), gradients)
    assert ours < torch.finfo(dtype).eps / 2, "rounded once"
    plain = relative_error(plainly_accumulated(gradients), gradients)
    assert plain > 5 * ours, "adding in half precision loses nothing, so this class does nothing"


def test_accumulation_shows_an_overflow_in_any_microbatch() -> None:
    gradients = make_gradients(4, torch.float16)
    gradients[1][7] = float("inf")
    assert accumulated(gradients)[7] == float("inf")
    large = [torch.full((3,), 40_000.0, dtype=torch.float16)] * 2
    assert accumulated(large).tolist() == [float("inf")] * 3, "no fp16 holds the sum"


@pytest.mark.parametrize("used_in", [(0, 1), (2, 3), (3,), ()])
@pytest.mark.parametrize("is_reduced", [False, True])
def test_a_weight_that_some_microbatches_do_not_use_keeps_the_sum_of_the_others(
    used_in: tuple[int, ...], is_reduced: bool
) -> None:
    """The reducer starts within the last backward; the sum over ranks doubles here, so it came after ours."""
    always, sometimes = (nn.Parameter(torch.zeros(NUM_WEIGHTS, dtype=torch.bfloat16)) for _ in range(2))
    accumulation = WideAccumulation([always, sometimes])
    doubling, factor = alone(factor=2), 2 if is_reduced else 1
    reducer = GradientReducer([("always", always), ("sometimes", sometimes)], doubling) if is_reduced else None
    gradients = make_gradients(4, torch.bfloat16)
    for _ in range(2):
        if reducer is None:
            always.grad = sometimes.grad = None
        else:
            reducer.zero_grad()
        accumulation.start_over()
        for k, gradient_N in enumerate(gradients):
            is_last = k == len(gradients) - 1
            if reducer is not None:
                reducer.is_active = is_last
            with accumulation.microbatch(is_last=is_last):
                output = (always * gradient_N).sum()
                (output + (sometimes * gradient_N).sum() if k in used_in else output).backward()
        if reducer is not None:
            reducer.wait()
        assert torch.equal(always.grad, factor * summed_over_ranks(gradients))
        used = [gradients[k] for k in used_in]
        expected_N = summed_over_ranks(used) if used else torch.zeros(NUM_WEIGHTS, dtype=torch.bfloat16)
        if used or is_reduced:
            assert torch.equal(sometimes.grad, factor * expected_N)
        else:
            assert sometimes.grad is None


def test_accumulation_in_fp32_is_for_half_precision_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2).half(), nn.BatchNorm1d(2), nn.Linear(2, 2).bfloat16())
    model[2].bias.requires_grad_(False)
    assert [p.dtype for p in half_parameters(model)] == [torch.float16, torch.float16, torch.bfloat16]
    weight = nn.Parameter(torch.zeros(3))
    nothing = WideAccumulation([])
    nothing.start_over()
    for is_last in (False, True):
        with nothing.microbatch(is_last=is_last):
            backward(weight, torch.ones(3))
    assert weight.grad.tolist() == [2.0] * 3
