"""Base of optimizers of whole matrices: selects the matrices, and updates other weights by SGD."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch
from torch import Tensor

from bigbatch.trainer.optim.division import Division, undivided
from bigbatch.trainer.optim.fused import (
    FusedOptimizer,
    by_device_and_dtype,
    momentum_buffers,
    overflow_flag,
    problem_with_number,
    problem_with_weights,
    unscaled_grads,
    write_,
)
from bigbatch.trainer.optim.wholes import AllHere, Wholes, shape_of


class MatrixOptimizer(FusedOptimizer):
    """Updates whole matrices, gathered if they lie in parts, and may divide the work over ranks."""

    _own: ClassVar[tuple[str, ...]] = ("divide", "wholes")
    replicated_state: ClassVar[tuple[str, ...]] = ()
    """State entries that do not have the weight's shape: whole on every rank, even if it updates a part only."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        """Check and keep the groups."""
        super().__init__(params, defaults)
        self.divide: Division = undivided
        """Replaced if several ranks hold the same tensors: each then does the work on some of them."""
        self.wholes: Wholes = AllHere()
        """Replaced if a rank holds only a part of each weight."""


def apart(group: dict[str, Any], *, vector_lr_factor: float = 1.0) -> list[dict[str, Any]]:
    """Divide a group into matrices that adapt and the rest, with its own rate; an empty part is left out."""
    named = list(zip(group["names"], group["params"], strict=True))
    matrices = {name for name, tensor in named if group["adapt"] and len(shape_of(tensor)) > 1}
    parts = []
    for is_matrix in (True, False):
        some = [(name, tensor) for name, tensor in named if (name in matrices) is is_matrix]
        factor = group.get("lr_factor", 1.0) * (1.0 if is_matrix else vector_lr_factor)
        part = {"names": [n for n, _ in some], "params": [t for _, t in some], "adapt": is_matrix, "lr_factor": factor}
        parts += [{**group, **part}] if some else []
    return parts


def problem_with_group(group: dict[str, Any], *, asked_by: str, does: str) -> str | None:
    """Return why a group cannot be updated: a setting of its SGD, a weight, or an adapting weight that is no matrix.

    does: the operation of asked_by on matrices.
    """
    problems = (problem_with_number(key, group[key]) for key in ("lr", "momentum", "weight_decay"))
    return (
        next(filter(None, problems), None)
        or problem_with_weights(group["params"], asked_by=asked_by)
        or _problem_with_vectors(group, reason=f"{asked_by} {does}")
    )


def _problem_with_vectors(group: dict[str, Any], *, reason: str) -> str | None:
    """Return an error for a weight that adapts but is no matrix, or None."""
    for index, weight in enumerate(group["params"]):
        if group["adapt"] and len(shape_of(weight)) < 2:
            name = group["names"][index] if "names" in group else f"parameter {index} of the group"
            return (
                f"{reason}, and {name} has shape {tuple(weight.shape)}: put it into a group with adapt=False, which "
                "follows SGD, as bigbatch.param_groups does"
            )
    return None


def problem_with_count(key: str, value: object) -> str | None:
    """Return why a count cannot have this value, or None."""
    if type(value) is int and value >= 1:  # type(): True would count as 1
        return None
    return f"{key} must be a whole number of at least 1, not {value!r}"


def updatable(groups: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], list[Tensor]]]:
    """List what one kernel can work on of each group, beside it: weights that have a gradient, and elements."""
    with_elements = [(group, [w for w in group["params"] if shape_of(w).numel()]) for group in groups]
    return [(group, weights) for group, some in with_elements for weights in by_device_and_dtype(some)]


def follow_(
    optimizer: torch.optim.Optimizer, weights: list[Tensor], group: dict[str, Any], grads: list[Tensor] | None = None
) -> None:
    """Make a group's SGD step along its gradients, or along the given directions."""
    write_(
        weights,
        unscaled_grads(optimizer, weights) if grads is None else grads,
        momentum_buffers(optimizer, weights, momentum=group["momentum"]),
        lr=group["lr"],
        overflow=overflow_flag(optimizer, weights[0].device),
        momentum=group["momentum"],
        nesterov=group["nesterov"],
        weight_decay=group["weight_decay"],
    )
