"""Lion (Chen et al. 2023, arXiv 2302.06675), fused over all tensors of a group."""

from typing import Any

import torch

from bigbatch.trainer.optim.fused import (
    FusedOptimizer,
    by_device_and_dtype,
    kept_like,
    overflow_flag,
    problem_with_betas,
    unscaled_grads,
    write_,
)


class Lion(FusedOptimizer):
    """Moves every weight by the learning rate, along the sign of a mean of its gradients, with decoupled decay.

    With gradient g and weight w: c = beta1 * m + (1 - beta1) * g;  w -= lr * (sign(c) + weight_decay * w)
    m = beta2 * m + (1 - beta2) * g
    This is algorithm 2 of the paper. Every setting can differ per parameter group.
    Gradients are only read; a step needs one more copy of a group's gradients, two under a GradScaler.
    A GradScaler's scale and overflow flag are applied on the device: an overflow leaves weights and means untouched.
    """

    _numbers = ("lr", "weight_decay")
    _kept = ("exp_avg",)

    def __init__(
        self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
    ) -> None:
        """Check the settings. Raises: ValueError for one that is out of range, and for unusable parameters."""
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    def _problem_with(self, group: dict[str, Any]) -> str | None:
        return problem_with_betas(group)

    def _update_groups_(self) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for weights in by_device_and_dtype(group["params"]):
                overflow = overflow_flag(self, weights[0].device)
                grads = unscaled_grads(self, weights)
                means = kept_like(self, weights, "exp_avg")
                updates = list(torch._foreach_lerp(means, grads, 1 - beta1))
                # m - (1 - beta2) * (m - g), by a kernel that writes nothing on overflow
                write_(means, grads, [], lr=1 - beta2, weight_decay=1.0, maximize=True, overflow=overflow)
                torch._foreach_sign_(updates)
                torch._foreach_add_(updates, means, alpha=0)  # torch's sign of NaN is 0, which would hide it
                write_(weights, updates, [], lr=group["lr"], weight_decay=group["weight_decay"], overflow=overflow)
