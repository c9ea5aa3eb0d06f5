"""torch's fused SGD, with plain or Nesterov's momentum."""

from typing import Any

import torch

from bigbatch.trainer.config.sections import OptimizerConfig


def make(settings: OptimizerConfig, groups: list[dict[str, Any]], *, lr: float) -> torch.optim.SGD:
    """Return the SGD of a config; its momentum starts from zero, not from the first gradient: the same update.

    An fp16 run's first step may overflow and be skipped: torch's fused kernel then leaves a momentum that was
    allocated for it and never written, and the next step takes that for one.
    """
    assert settings.momentum is not None
    assert settings.nesterov is not None
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=settings.momentum, nesterov=settings.nesterov, fused=True)
    if settings.momentum > 0:
        for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
            optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer
