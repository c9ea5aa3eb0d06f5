"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for matrices and convolutions, fused."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bigbatch.trainer.config.sections import OptimizerConfig
from bigbatch.trainer.optim.fused import (
    kept_like,
    overflow_flag,
    shape_of,
    unscaled_grads,
    write_,
    zeros_like_all,
)
from bigbatch.trainer.optim.matrices import MatrixOptimizer, batched_by_shape, problem_with_count, sgd_step_, updatable

PRECISIONS = ("fp32", "bf16")
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of p(s) = a s + b s**3 + c s**5 by Jordan et al. 2024: steep at 0, so that five steps suffice.

Source: https://kellerjordan.github.io/posts/muon, github.com/KellerJordan/Muon; torch.optim.Muon has the same.
"""
SMALLEST_NORM = 1e-7
"""Least divisor: a matrix with a smaller norm is divided by this, as in the source."""


class Muon(MatrixOptimizer):
    """Updates matrices along their orthogonalised momentum, and other weights by Nesterov SGD.

    With gradient g, weight w, momentum buffer v, and a convolution's filters as rows of a matrix (out x in * kh * kw):
    v = momentum * v + g;  u = g + momentum * v (v without nesterov)
    w -= lr * (sqrt(max(1, rows / columns)) * orthogonalised(u) + weight_decay * w)
    A group with `adapt=False` (bias, batch norm, all weights with fewer than two dimensions) follows
    v = momentum * v + g + weight_decay * w;  w -= lr * (g + weight_decay * w + momentum * v)

    orthogonalised: newton_schulz_steps steps of newton_schulz, whose matrix products are in the weights' own precision
    ("fp32") or in bf16. The source keeps v as a mean, (1 - momentum) times ours: the same direction.
    Every other setting can differ per parameter group. Gradients are only read. A GradScaler's scale and overflow flag
    are applied on the device: step() never waits for it, and an overflow leaves weights and momentum unchanged.
    """

    _own = (*MatrixOptimizer._own, "_steps", "_precision")
    _does = "makes matrices orthogonal"

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = True,
        newton_schulz_steps: int = 5,
        newton_schulz_precision: str = "fp32",
        adapt: bool = True,
    ) -> None:
        """Check the settings. Raises: ValueError for one that is out of range, and for a group with vectors in it."""
        self._steps, self._precision = newton_schulz_steps, newton_schulz_precision
        if newton_schulz_precision not in PRECISIONS:
            raise ValueError(
                f"newton_schulz_precision must be one of {', '.join(PRECISIONS)}, not {newton_schulz_precision!r}"
            )
        if problem := problem_with_count("newton_schulz_steps", newton_schulz_steps):
            raise ValueError(problem)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov, "adapt": adapt}
        super().__init__(params, defaults)

    def _update_groups_(self) -> None:
        parts = updatable(self.param_groups)
        matrices = [(group, weights) for group, weights in parts if group["adapt"]]
        directions = [self._directions(weights, group) for group, weights in matrices]
        all_weights = [w for _, weights in matrices for w in weights]
        finish = self._start(self.wholes.gather(all_weights, [d for some in directions for d in some]))
        # meanwhile the results of other ranks arrive
        for group, weights in parts:
            if not group["adapt"]:
                sgd_step_(self, weights, group)
        found = iter(self.wholes.own(all_weights, finish()))
        for (group, weights), updates in zip(matrices, directions, strict=True):
            torch._foreach_copy_(updates, [next(found) for _ in updates])
            # a tall matrix changes its outputs as much as a square one, as in the source
            shapes = map(shape_of, weights)
            torch._foreach_mul_(updates, [math.sqrt(max(1.0, shape[0] / math.prod(shape[1:]))) for shape in shapes])
            overflow, decay = overflow_flag(self, weights[0].device), group["weight_decay"]
            write_(weights, updates, [], lr=group["lr"], weight_decay=decay, overflow=overflow)

    def _directions(self, weights: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return the directions to orthogonalise, in the weights' layout; updates the momentum.

        It runs the kernel of SGD(fused=True) with zeros for weights and learning rate -1; on overflow zeros and
        momentum stay.
        """
        directions = zeros_like_all(weights)
        overflow = overflow_flag(self, weights[0].device)
        write_(
            directions,
            unscaled_grads(self, weights),
            kept_like(self, weights) if group["momentum"] else [],
            lr=-1.0,
            overflow=overflow,
            momentum=group["momentum"],
            nesterov=group["nesterov"],
        )
        return directions

    def _start(self, directions: list[Tensor]) -> Callable[[], list[Tensor]]:
        if not directions:
            return list
        dtype = torch.bfloat16 if self._precision == "bf16" else directions[0].dtype
        work = partial(orthogonalised, steps=self._steps, dtype=dtype)
        return self.divide(directions, work, costs=[cost(d.shape) for d in directions], dtype=dtype)


def shared_work(settings: OptimizerConfig, shapes: Iterable[torch.Size]) -> list[tuple[float, int]]:
    """List cost and number of elements of each matrix that ranks divide among themselves, from the weights' shapes."""
    return [(cost(shape), math.prod(shape)) for shape in shapes]


def newton_schulz(matrices_BMN: Tensor, *, steps: int) -> Tensor:
    """Return matrices with each singular value s replaced by p(p(... p(s))), p of COEFFICIENTS applied steps times.

    The caller divides each matrix by its Frobenius norm before. With five steps, singular values of at least 1 / 660
    end between 0.68 and 1.21: not the nearest orthogonal matrix, but near one; smaller ones grow 485-fold. It takes
    steps * (4 m**2 n + 2 m**3) multiplications and additions per matrix, m <= n.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices_BMN.size(-2) > matrices_BMN.size(-1)
    x_BMN = matrices_BMN.mT if is_tall else matrices_BMN
    for _ in range(steps):
        gram_BMM = x_BMN @ x_BMN.mT
        polynomial_BMM = torch.baddbmm(gram_BMM, gram_BMM, gram_BMM, beta=b, alpha=c)
        x_BMN = torch.baddbmm(x_BMN, polynomial_BMM, x_BMN, beta=a)
    return x_BMN.mT if is_tall else x_BMN


def orthogonalised(tensors: list[Tensor], *, steps: int, dtype: torch.dtype) -> list[Tensor]:
    """Return orthogonalised copies of tensors, as matrices (first dimension x all others), computed in dtype."""

    def work(some: list[Tensor]) -> list[Tensor]:
        shape, strides = some[0].shape, _by_rows(some[0])
        matrices_BMN = some[0].new_empty((len(some), shape[0], math.prod(shape[1:])))
        torch._foreach_copy_([matrix_MN.as_strided(shape, strides) for matrix_MN in matrices_BMN.unbind()], some)
        # in the tensors' own precision: in bf16 the norm would have an error of 0.4%
        norms_B11 = torch.linalg.vector_norm(matrices_BMN, dim=(1, 2), keepdim=True).clamp_(min=SMALLEST_NORM)
        found_BMN = newton_schulz(matrices_BMN.div_(norms_B11).to(dtype), steps=steps).contiguous()
        return [found_MN.as_strided(shape, strides) for found_MN in found_BMN.unbind()]

    return batched_by_shape(tensors, work)


def _by_rows(tensor: Tensor) -> tuple[int, ...]:
    """Return strides with contiguous rows: the tensor's own if its rows are contiguous (channels-last, too).

    Columns then come in the order of memory: the orthogonal factor of G P is that of G times P, for any permutation P.
    """
    if tensor.stride(0) * tensor.size(0) == tensor.numel():
        return tensor.stride()
    return tensor.new_empty(tensor.shape, device="meta").stride()


def cost(shape: torch.Size) -> float:
    """Return the operations of a step of newton_schulz on a matrix (first dimension x all others)."""
    rows, columns = shape[0], math.prod(shape[1:])
    short, long = sorted((rows, columns))
    return 4.0 * short**2 * long + 2.0 * short**3
