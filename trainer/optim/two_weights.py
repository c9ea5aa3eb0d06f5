"""Training and evaluation weights of optimizers that have both, such as Schedule-Free."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class TwoWeights:
    """Switches an optimizer between its training weights, in which it is now, and those for evaluation."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer: Any = optimizer
        self._params: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]

    @contextmanager
    def for_evaluation(self, *, on_change: Callable[[], None]) -> Iterator[list[Tensor]]:
        """Swap in the weights for evaluation and checkpoints; swap back on exit. Yields copies of the training weights.

        The exit copies them back bit by bit: train() after eval() would restore them only up to rounding. on_change is
        called after each change of parameters.
        """
        in_training: list[Tensor] = [p.detach().clone() for p in self._params]
        self._optimizer.eval()
        on_change()
        try:
            yield in_training
        finally:
            self.restore(in_training)
            on_change()

    @torch.no_grad()
    def restore(self, in_training: list[Tensor]) -> None:
        """Restore exactly the training weights that for_evaluation() yielded; of an empty list, none."""
        self._optimizer.train()
        if in_training:
            for p, kept in zip(self._params, in_training, strict=True):
                p.copy_(kept)


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer has two sets of weights, for training and for evaluation."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
