"""What optimizers of whole matrices share: which weights are matrices, and SGD of the others."""

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
    """Updates matrices by all that is in each, wherever it is, and may share the work with ranks that do the same."""

    _own: ClassVar[tuple[str, ...]] = ("divide", "wholes")
    replicated_state: ClassVar[tuple[str, ...]] = ()
    """What it keeps for a weight that is not of the weight's shape: whole on every rank, whatever part that updates."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        """Take the groups."""
        super().__init__(params, defaults)
        self.divide: Division = undivided
        """Replaced where several ranks hold the same tensors: each then does the work on a share of them."""
        self.wholes: Wholes = AllHere()
        """Replaced where a rank holds only a part of each weight."""


def apart(group: dict[str, Any], *, vector_lr_factor: float = 1.0) -> list[dict[str, Any]]:
    """Divide a group into matrices that adapt and the rest, at its own rate; without a part that would be empty."""
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
    """Say why a group cannot be updated: a setting of its SGD, a weight, or no matrix where one adapts.

    does: what asked_by does with matrices.
    """
    problems = (problem_with_number(key, group[key]) for key in ("lr", "momentum", "weight_decay"))
    return (
        next(filter(None, problems), None)
        or problem_with_weights(group["params"], asked_by=asked_by)
        or _problem_with_vectors(group, reason=f"{asked_by} {does}")
    )


def _problem_with_vectors(group: dict[str, Any], *, reason: str) -> str | None:
    """Say, with a reason, which weight of a group that adapts is no matrix."""
    for index, weight in enumerate(group["params"]):
        if group["adapt"] and len(shape_of(weight)) < 2:
            name = group["names"][index] if "names" in group else f"parameter {index} of the group"
            return (
                f"{reason}, and {name} has shape {tuple(weight.shape)}: put it into a group with adapt=False, which "
                "goes by SGD, as bigbatch.param_groups does"
            )
    return None


def problem_with_count(key: str, value: object) -> str | None:
    """Say why a setting that counts something cannot have this value."""
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
    """Make a group's step of SGD along its gradients, or along others in their place."""
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
