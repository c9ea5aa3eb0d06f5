"""torch's fused AdamW."""

from typing import Any

import torch

from bigbatch.trainer.config.sections import OptimizerConfig


def make(settings: OptimizerConfig, groups: list[dict[str, Any]], *, lr: float) -> torch.optim.AdamW:
    """Return the AdamW of a config."""
    assert settings.betas is not None
    assert settings.eps is not None
    return torch.optim.AdamW(groups, lr=lr, betas=settings.betas, eps=settings.eps, fused=True)
