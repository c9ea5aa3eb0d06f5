"""Training and evaluation weights of optimizers that have both, such as Schedule-Free."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


def use_training_weights(optimizer: torch.optim.Optimizer) -> None:
    """Switch an optimizer with two sets of weights to its training weights; does nothing to others."""
    if has_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]


@contextmanager
def evaluation_weights(optimizer: torch.optim.Optimizer, *, on_change: Callable[[], None]) -> Iterator[list[Tensor]]:
    """Swap in the weights for evaluation and checkpoints, such as Schedule-Free's average; swap back on exit.

    Yields copies of the training weights; an empty list if both are the same. The exit copies them back bit by bit:
    train() after eval() would restore them only up to rounding. on_change is called after each change of parameters.
    """
    if not has_modes(optimizer):
        yield []
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    in_training: list[Tensor] = [p.detach().clone() for p in params]
    optimizer.eval()  # type: ignore[attr-defined]
    on_change()
    try:
        yield in_training
    finally:
        restore_training_weights(optimizer, in_training)
        on_change()


@torch.no_grad()
def restore_training_weights(optimizer: torch.optim.Optimizer, in_training: list[Tensor]) -> None:
    """Restore exactly the training weights that evaluation_weights yielded."""
    use_training_weights(optimizer)
    if in_training:
        params: list[Any] = [p for group in optimizer.param_groups for p in group["params"]]
        for p, kept in zip(params, in_training, strict=True):
            p.copy_(kept)


def has_modes(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer has two sets of weights, for training and for evaluation."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))
