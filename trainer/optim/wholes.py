"""Whole tensors for an optimizer that needs them, where a rank updates a part of each alone."""

from typing import Protocol

import torch
from torch import Tensor, nn


class Part(nn.Parameter):
    """Holds the elements of a tensor that a rank updates, flat; it knows the shape of the whole."""

    whole_shape: torch.Size


def shape_of(weight: Tensor) -> torch.Size:
    """Return the shape of the tensor that a weight is, or is a part of."""
    return weight.whole_shape if isinstance(weight, Part) else weight.shape


class Wholes(Protocol):
    """Puts whole tensors together out of what ranks have of each, and takes a rank's part of them."""

    def gather(self, weights: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
        """Return whole tensors, laid out as whole weights; parts lie as the weights do. Collective."""
        ...

    def own(self, weights: list[Tensor], wholes: list[Tensor]) -> list[Tensor]:
        """Return of each whole tensor the part that lies as its weight does."""
        ...


class AllHere:
    """Gives back what it gets, where each weight is whole."""

    def gather(self, weights: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
        """Return the parts, which are whole."""
        return parts

    def own(self, weights: list[Tensor], wholes: list[Tensor]) -> list[Tensor]:
        """Return the wholes."""
        return wholes
