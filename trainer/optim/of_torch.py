"""Fused optimizers of torch."""

from typing import Any

import torch


def make_sgd(groups: list[dict[str, Any]], *, lr: float, momentum: float, nesterov: bool) -> torch.optim.SGD:
    """Return torch's fused SGD, whose momentum starts from zero, not from the first gradient: the same update.

    An fp16 run's first step may overflow and be skipped: torch's fused kernel then leaves its momentum buffer allocated
    but unwritten, and the next step reads it.
    """
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=True)
    if momentum > 0:
        for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
            optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


def make_adamw(groups: list[dict[str, Any]], **settings: Any) -> torch.optim.AdamW:
    """Return torch's fused AdamW with these settings."""
    return torch.optim.AdamW(groups, fused=True, **settings)
