"""A ghost batch on several ranks, here one after another, against plain batch norm of the whole in float64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from error_texts import naming
from torch import Tensor, nn

from bigbatch.trainer.models.norm import GhostBatchNorm2d
from bigbatch.trainer.models.spread_norm import RankGroup

C, H, W, PART = 3, 4, 5, 4
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


class Replay:
    """Ranks one after another in one thread, as many rounds as a pass has gathers, and one: in round i all ranks know
    what the others gave to the first i gathers, so the last round is the true one."""

    def __init__(self, num_ranks: int, *, num_gathers: int) -> None:
        self._num_ranks, self._num_gathers = num_ranks, num_gathers
        self._given: list[list[Tensor]] = [[] for _ in range(num_ranks)]

    def run(self, work: Callable[[RankGroup, int], Any]) -> list[Any]:
        """What work(group, rank) of each rank gives in the last round."""
        results: list[Any] = []
        for _ in range(self._num_gathers + 1):
            before = [list(given) for given in self._given]
            results = [work(self._group(rank, before), rank) for rank in range(self._num_ranks)]
        assert {len(given) for given in self._given} == {self._num_gathers}
        return results

    def _group(self, rank: int, before: list[list[Tensor]]) -> RankGroup:
        given: list[Tensor] = []
        self._given[rank] = given

        def gather(own_N: Tensor) -> Tensor:
            number = len(given)
            given.append(own_N.clone())
            return torch.stack([other[number] if number < len(other) else own_N for other in before])

        return RankGroup(self._num_ranks, gather)


@dataclass(frozen=True)
class Result:
    outputs: Tensor
    grad_inputs: Tensor
    grad_weight: Tensor
    grad_bias: Tensor
    running_mean: Tensor
    running_var: Tensor


def run_norm(norm: nn.BatchNorm2d, inputs: Tensor, grads: Tensor) -> Result:
    """Forward and backward; parameters and statistics that are none of the defaults."""
    for value, start in ((norm.weight, 0.5), (norm.bias, -1.0), (norm.running_mean, 2.0), (norm.running_var, 3.0)):
        value.data = torch.arange(C, dtype=value.dtype, device=value.device) + start
    inputs = inputs.detach().requires_grad_()
    outputs = norm(inputs)
    outputs.backward(grads)
    assert inputs.grad is not None
    parts = (outputs.detach(), inputs.grad, norm.weight.grad, norm.bias.grad, norm.running_mean, norm.running_var)
    return Result(*parts)


def spread(inputs: Tensor, grads: Tensor, *, num_ranks: int, dtype: torch.dtype) -> list[Result]:
    """Each rank's result on its part of one ghost batch; one gather in forward, one in backward."""

    def work(group: RankGroup, rank: int) -> Result:
        norm = GhostBatchNorm2d(C, bn_span=len(inputs), ghosts_per_step=1, group=group).to(inputs.device, dtype)
        part = slice(rank * PART, (rank + 1) * PART)
        return run_norm(norm, inputs[part], grads[part])

    return Replay(num_ranks, num_gathers=2).run(work)


def whole(inputs: Tensor, grads: Tensor) -> Result:
    """torch's own batch norm of the concatenated batch, in float64 on the CPU."""
    return run_norm(nn.BatchNorm2d(C).double(), inputs.cpu().double(), grads.cpu().double())


def make_batch(num_ranks: int, dtype: torch.dtype, *, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """Images with another mean and spread on each rank, and a gradient; channels-last, as in training."""
    generator = torch.Generator().manual_seed(num_ranks)
    shape = (num_ranks, PART, C, H, W)
    scale = torch.arange(1.0, num_ranks + 1).view(-1, 1, 1, 1, 1)
    inputs = (torch.randn(shape, generator=generator) * scale + scale + offset).flatten(0, 1)
    grads = (torch.randn(shape, generator=generator) * scale).flatten(0, 1)
    return tuple(t.to(dtype, memory_format=torch.channels_last) for t in (inputs, grads))  # type: ignore[return-value]


def assert_equal(results: list[Result], expected: Result, *, rtol: float, atol: float) -> None:
    """Outputs are parts of the whole, gradients of weight and bias sum to its, statistics are its on every rank."""

    def close(got: Tensor, want: Tensor, rtol: float = rtol, atol: float = atol) -> None:
        torch.testing.assert_close(got.cpu().double(), want, rtol=rtol, atol=atol)

    close(torch.cat([result.outputs for result in results]), expected.outputs)
    close(torch.cat([result.grad_inputs for result in results]), expected.grad_inputs)
    # statistics and these sums are of fp32 for half-precision input too
    exact = max(1e-10, min(rtol, 1e-4))
    close(sum(result.grad_weight.double() for result in results), expected.grad_weight, exact, 10 * exact)
    close(sum(result.grad_bias.double() for result in results), expected.grad_bias, exact, 10 * exact)
    for result in results:
        close(result.running_mean, expected.running_mean, exact, exact)
        close(result.running_var, expected.running_var, exact, exact)
        assert torch.equal(result.running_var, results[0].running_var), "the ranks hold the same bits"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("num_ranks", "dtype"), [(4, torch.float64), (2, torch.float32), (2, torch.bfloat16), (4, torch.float16)]
)
def test_spread_norm_parts_are_those_of_plain_batch_norm_of_the_whole(
    num_ranks: int, dtype: torch.dtype, device: str
) -> None:
    inputs, grads = (tensor.to(device) for tensor in make_batch(num_ranks, dtype))
    wide = dtype if dtype == torch.float64 else torch.float32
    results = spread(inputs, grads, num_ranks=num_ranks, dtype=wide)
    rounding = {torch.float64: 1e-12, torch.float32: 1e-5}.get(dtype, 2 * torch.finfo(dtype).eps)
    assert_equal(results, whole(inputs, grads), rtol=rounding, atol=rounding)
    assert results[0].outputs.dtype == results[0].grad_inputs.dtype == dtype
    assert results[0].outputs.is_contiguous(memory_format=torch.channels_last)


def test_spread_norm_rank_alone_would_be_wrong() -> None:
    """The comparison above detects statistics of one rank alone."""
    inputs, grads = make_batch(2, torch.float32)
    norm = GhostBatchNorm2d(C, bn_span=PART, ghosts_per_step=1)
    outputs = run_norm(norm, inputs[:PART], grads[:PART]).outputs
    assert (outputs.double() - whole(inputs, grads).outputs[:PART]).abs().max() > 0.1


def test_spread_norm_large_mean_does_not_cancel_the_variance() -> None:
    """Sums of squares would lose it: 1000^2 beside 1 leaves 1 digit of fp32."""
    inputs, grads = make_batch(2, torch.float32, offset=1000.0)
    results = spread(inputs, grads, num_ranks=2, dtype=torch.float32)
    expected = whole(inputs, grads)
    for result in results:
        torch.testing.assert_close(result.running_var.double(), expected.running_var, rtol=1e-5, atol=0)
    # an output is as exact as its image: 1000 has steps of 6e-5
    assert_equal(results, expected, rtol=1e-3, atol=1e-3)


def refuse(own_N: Tensor) -> Tensor:
    raise AssertionError("a rank was asked")


UNHEARD = RankGroup(2, refuse)


def test_spread_norm_evaluation_asks_no_other_rank() -> None:
    norm = GhostBatchNorm2d(C, bn_span=2 * PART, ghosts_per_step=1, group=UNHEARD).eval()
    images = make_batch(1, torch.float32)[0]
    torch.testing.assert_close(norm(images), nn.BatchNorm2d(C).eval()(images), rtol=0, atol=0)


def test_spread_norm_part_of_another_size_is_refused() -> None:
    norm = GhostBatchNorm2d(C, bn_span=2 * PART, ghosts_per_step=1, group=UNHEARD)
    with pytest.raises(ValueError, match=naming("5 samples", "bn_span 8", "2 ranks")):
        norm(torch.zeros(PART + 1, C, H, W))
