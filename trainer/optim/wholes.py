"""Whole tensors for an optimizer that needs them, if each rank updates only a part of each."""

from typing import Protocol

import torch
from torch import Tensor, nn


class Part(nn.Parameter):
    """Flat elements of a tensor that a rank updates, with the shape of the whole tensor."""

    whole_shape: torch.Size


def shape_of(weight: Tensor) -> torch.Size:
    """Return the shape of a weight, or of the whole tensor that it is a part of."""
    return weight.whole_shape if isinstance(weight, Part) else weight.shape


class Wholes(Protocol):
    """Gathers whole tensors from the ranks' parts, and returns a rank's part of them."""

    def gather(self, weights: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
        """Return whole tensors, laid out as whole weights; parts lie as the weights do. Collective."""
        ...

    def own(self, weights: list[Tensor], wholes: list[Tensor]) -> list[Tensor]:
        """Return the part of each whole tensor that is laid out as its weight."""
        ...


class AllHere:
    """Returns its inputs: each weight is already whole."""

    def gather(self, weights: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
        """Return the parts, which are whole."""
        return parts

    def own(self, weights: list[Tensor], wholes: list[Tensor]) -> list[Tensor]:
        """Return the wholes."""
        return wholes
