"""Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) for matrices and convolutions, fused."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bigbatch.trainer.config.sections import OptimizerConfig
from bigbatch.trainer.optim.fused import momentum_buffers, overflow_flag, unscaled_grads, write_
from bigbatch.trainer.optim.matrices import (
    MatrixOptimizer,
    follow_,
    problem_with_count,
    problem_with_group,
    updatable,
)
from bigbatch.trainer.optim.newton_schulz import cost, orthogonalised
from bigbatch.trainer.optim.wholes import shape_of

PRECISIONS = ("fp32", "bf16")


class Muon(MatrixOptimizer):
    """Updates matrices along their orthogonalised momentum, and other weights by Nesterov SGD.

    With gradient g, weight w, momentum buffer v, and a convolution's filters as rows of a matrix (out x in * kh * kw):
    v = momentum * v + g;  u = g + momentum * v (v without nesterov)
    w -= lr * (sqrt(max(1, rows / columns)) * orthogonalised(u) + weight_decay * w)
    A group with `adapt=False` (bias, batch norm, all weights with fewer than two dimensions) follows
    v = momentum * v + g + weight_decay * w;  w -= lr * (g + weight_decay * w + momentum * v)

    orthogonalised: newton_schulz_steps of newton_schulz, in the weights' own precision ("fp32") or in bf16, where they
    are products of matrices alone. The source keeps v as a mean, (1 - momentum) times ours: the same direction.
    Every other setting can differ per parameter group. Gradients are only read. A GradScaler's scale and overflow flag
    are applied on the device: step() never waits for it, and an overflow leaves weights and momentum untouched.
    """

    _own = (*MatrixOptimizer._own, "_steps", "_precision")

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

    def _problem_with(self, group: dict[str, Any]) -> str | None:
        return problem_with_group(group, asked_by="Muon", does="makes matrices orthogonal")

    def _update_groups_(self) -> None:
        parts = updatable(self.param_groups)
        matrices = [(group, weights) for group, weights in parts if group["adapt"]]
        directions = [self._directions(weights, group) for group, weights in matrices]
        all_weights = [w for _, weights in matrices for w in weights]
        finish = self._start(self.wholes.gather(all_weights, [d for some in directions for d in some]))
        # while results of other ranks are on their way
        for group, weights in parts:
            if not group["adapt"]:
                follow_(self, weights, group)
        found = iter(self.wholes.own(all_weights, finish()))
        for (group, weights), updates in zip(matrices, directions, strict=True):
            torch._foreach_copy_(updates, [next(found) for _ in updates])
            torch._foreach_mul_(updates, [_scale(shape_of(w)) for w in weights])
            overflow, decay = overflow_flag(self, weights[0].device), group["weight_decay"]
            write_(weights, updates, [], lr=group["lr"], weight_decay=decay, overflow=overflow)

    def _directions(self, weights: list[Tensor], group: dict[str, Any]) -> list[Tensor]:
        """Return the directions to orthogonalise, laid out like the weights; updates the momentum.

        The kernel of SGD(fused=True), given zeros for weights and -1 for a learning rate; on overflow it leaves the
        zeros and the momentum.
        """
        directions = [torch.empty_like(w) for w in weights]
        torch._foreach_zero_(directions)
        overflow = overflow_flag(self, weights[0].device)
        write_(
            directions,
            unscaled_grads(self, weights),
            momentum_buffers(self, weights, momentum=group["momentum"]),
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
    """List cost and elements of each matrix that ranks divide among them, by weights' shapes."""
    return [(cost(shape), math.prod(shape)) for shape in shapes]


def _scale(shape: torch.Size) -> float:
    """Return the factor by which a tall matrix changes its outputs as much as a square one, as in the source."""
    return math.sqrt(max(1.0, shape[0] / math.prod(shape[1:])))
