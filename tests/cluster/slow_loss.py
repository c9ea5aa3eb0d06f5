"""A loss of one's own that takes its time, so that a training is still under way whatever happens to its nodes."""

import time

import torch.nn.functional as F
from torch import Tensor


def loss(logits_BK: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each image."""
    time.sleep(0.2)
    return F.cross_entropy(logits_BK, targets, reduction="none")
