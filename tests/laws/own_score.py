"""A loss and metrics of another package, as far as a config knows: by their import paths."""

import torch
import torch.nn.functional as F
from torch import Tensor


def focal(logits_BK: Tensor, targets: Tensor, *, gamma: float) -> Tensor:
    """Lin et al. 2017 (arXiv 1708.02002), eq. 4."""
    losses_B = F.cross_entropy(logits_BK, targets, reduction="none")
    return (1 - torch.exp(-losses_B)) ** gamma * losses_B


def is_right(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Return 1 for each right answer: their mean is top-1."""
    return logits_BK.argmax(1) == labels_B


class LeastShare:
    """The share of right answers of the class that has the lowest one, times 100 times its number of images."""

    def __init__(self, *, num_classes: int) -> None:
        self.num_classes = num_classes

    def __call__(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        own_BK = F.one_hot(labels_B, self.num_classes)
        return torch.cat([own_BK * is_right(logits_BK, labels_B)[:, None], own_BK], dim=1)

    def result(self, sums_M: Tensor) -> float:
        right_K, all_K = sums_M.chunk(2)
        worst = int((right_K / all_K).argmin())
        return float(right_K[worst] / all_K[worst] + 100 * all_K[worst])
