"""An optimizer step that the device may decide to skip."""

from collections.abc import Sequence

import torch
from torch import Tensor

CLIP_EPS = 1e-6
"""Added to the norm, as in torch.nn.utils.clip_grad_norm_."""


def clip_divisor(norm: Tensor, *, largest: float) -> Tensor:
    """Return what gradients of that norm () are divided by so that it is at most largest; 1 where it is already."""
    return ((norm + CLIP_EPS) / largest).clamp(min=1.0)


def step_or_skip_(
    optimizer: torch.optim.Optimizer, grads: Sequence[Tensor], *, divisor: Tensor | None, skip: Tensor
) -> None:
    """Make one step with the gradients divided by divisor (None: as they are), or none where skip (bool) is true.

    Fused optimizers, ours too, divide and skip in their own kernels. For the others the host waits for skip.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        return
    if divisor is not None:
        torch._foreach_div_(list(grads), divisor)
    if not skip.item():
        optimizer.step()
