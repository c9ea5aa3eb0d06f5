"""LAMB (You et al. 2019, arXiv 1904.00962), fused over all tensors of a group."""

from typing import Any

import torch
from torch import Tensor

from bigbatch.trainer.optim.fused import (
    FusedOptimizer,
    Norms,
    by_adaptation,
    count_steps_,
    kept_like,
    norms_of,
    one_where_a_norm_is_zero,
    overflow_flag,
    problem_with_betas,
    scaled,
    unscaled_grads,
    write_,
    zeros_like_all,
)


class LAMB(FusedOptimizer):
    """Follows Adam's direction with decoupled weight decay, at the length that the trust ratio gives each tensor.

    With gradient g, weight w, and t steps done with this one:
    m = beta1 * m + (1 - beta1) * g;  v = beta2 * v + (1 - beta2) * g ** 2
    u = (m / (1 - beta1 ** t)) / (sqrt(v / (1 - beta2 ** t)) + eps) + weight_decay * w
    w -= lr * r * u,  with r = |w| / |u|, or 1 if |w| or |u| is 0
    This is algorithm 2 of the paper's last version, bias correction included, with the identity for its phi. It does
    not clip gradients to norm 1 before, as apex and NVIDIA do (config key optimizer.clip_norm).

    Every setting can differ per parameter group. `adapt=False` fixes r = 1; without `adapt`, parameters of fewer than
    two dimensions (bias and batch norm) have r = 1. param_groups also exempts them from the decay. Gradients are only
    read; a step needs one more copy of a group's gradients, two under a GradScaler; on a GPU two, and as many zeros as
    its largest tensor has elements. A GradScaler's scale and overflow flag are applied on the device: step() never
    waits for it, and an overflow leaves weights, moments and the count of steps unchanged.
    """

    _own = ("norms",)
    _numbers = ("lr", "eps", "weight_decay")
    _kept = ("exp_avg", "exp_avg_sq", "step")

    def __init__(
        self,
        params: Any,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        adapt: bool | None = None,
    ) -> None:
        """Check the settings. Raises: ValueError for one that is out of range, and for unusable parameters."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt})
        self.norms: Norms = norms_of
        """Replaced if the parameters are parts of tensors, since a trust ratio needs whole tensors."""

    def _problem_with(self, group: dict[str, Any]) -> str | None:
        if group["eps"] == 0:
            return (
                f"eps must be positive, such as 1e-6, not {group['eps']}: a gradient that was always 0 is divided by it"
            )
        return problem_with_betas(group)

    def _update_groups_(self) -> None:
        for weights, group in by_adaptation(self.param_groups):
            overflow = overflow_flag(self, weights[0].device)
            updates = self._directions(weights, group, overflow)
            torch._foreach_add_(updates, weights, alpha=group["weight_decay"])
            if group["adapt"]:
                w_N, u_N = self.norms([*weights, *updates]).view(2, -1)
                updates = scaled(updates, one_where_a_norm_is_zero(w_N / u_N, w_N, u_N))
            write_(weights, updates, [], lr=group["lr"], overflow=overflow)

    def _directions(self, weights: list[Tensor], group: dict[str, Any], overflow: Tensor | None) -> list[Tensor]:
        """Return Adam's bias-corrected directions; updates moments and step counts.

        It runs the kernel of Adam(fused=True) with zeros for weights and learning rate -1; on overflow zeros and
        moments stay, so that no inf or NaN reaches the trust ratio.
        """
        grads = unscaled_grads(self, weights)
        directions = zeros_like_all(weights)
        means, squares = (kept_like(self, weights, key) for key in ("exp_avg", "exp_avg_sq"))
        steps = count_steps_(self, weights)
        # the kernel corrects the bias by this count, so it is raised before
        torch._foreach_add_(steps, 1)
        torch._fused_adam_(
            directions,
            grads,
            means,
            squares,
            [],
            steps,
            # w - lr * direction: from zeros, the direction itself
            lr=-1.0,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=0.0,
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            found_inf=overflow,
        )
        if overflow is not None:
            # subtracts the 1 again if the step was skipped, without a host sync to learn that
            torch._foreach_sub_(steps, [overflow] * len(steps))
        return directions
