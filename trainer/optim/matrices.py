"""Base of optimizers of whole matrices: selects the matrices, and updates other weights by SGD."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from bigbatch.trainer.optim.fused import (
    FusedOptimizer,
    by_device_and_dtype,
    kept_like,
    overflow_flag,
    shape_of,
    unscaled_grads,
    write_,
)

Work = Callable[[list[Tensor]], list[Tensor]]
"""Maps a list of tensors to a list of results, one of the same shape for each."""
Finish = Callable[[], list[Tensor]]
"""Waits for the results of all tensors."""


class Division(Protocol):
    """Divides work among ranks that hold the same tensors, so that each computes some of the results."""

    def __call__(self, tensors: list[Tensor], work: Work, *, costs: list[float], dtype: torch.dtype) -> Finish:
        """Start the work on all tensors. costs: operations per tensor; dtype: that of the results. Collective."""
        ...


def undivided(tensors: list[Tensor], work: Work, *, costs: list[float], dtype: torch.dtype) -> Finish:
    """Do all work on this rank."""
    results = work(tensors)
    return lambda: results


class Part(nn.Parameter):
    """Flat elements of a tensor that a rank updates, with the shape of the whole tensor."""

    whole_shape: torch.Size


class Gatherer(Protocol):
    """Gathers whole tensors from the ranks' parts, and returns a rank's part of them."""

    def gather(self, weights: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
        """Return whole tensors in the layout of whole weights, from parts in the layout of weights. Collective."""
        ...

    def own(self, weights: list[Tensor], wholes: list[Tensor]) -> list[Tensor]:
        """Return this rank's part of each whole tensor, in the layout of its weight."""
        ...


class NothingToGather:
    """Returns its inputs: each weight is already whole."""

    def gather(self, weights: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
        return parts

    def own(self, weights: list[Tensor], wholes: list[Tensor]) -> list[Tensor]:
        return wholes


class MatrixOptimizer(FusedOptimizer):
    """Updates whole matrices, gathered if they lie in parts, and may divide the work over ranks."""

    _own: ClassVar[tuple[str, ...]] = ("divide", "wholes")
    _does: ClassVar[str]
    """Predicate of an error: what the optimizer does to matrices."""
    replicated_state: ClassVar[tuple[str, ...]] = ()
    """State entries that do not have the weight's shape: whole on every rank, even if it updates a part only."""

    def __init__(self, params: Any, defaults: dict[str, Any]) -> None:
        super().__init__(params, defaults)
        self.divide: Division = undivided
        """Replaced if several ranks hold the same tensors: each then computes some of the results."""
        self.wholes: Gatherer = NothingToGather()
        """Replaced if a rank holds only a part of each weight."""

    def _problem_with(self, group: dict[str, Any]) -> str | None:
        for index, weight in enumerate(group["params"]):
            if group["adapt"] and len(shape_of(weight)) < 2:
                names = group.get("names", group.get("param_names"))
                name = names[index] if names else f"parameter {index} of the group"
                return (
                    f"{type(self).__name__} {self._does}, and {name} has shape {tuple(weight.shape)}: put it into a "
                    "group with adapt=False, which follows SGD, as bigbatch.param_groups does"
                )
        return None


def apart(group: dict[str, Any], *, vector_lr_factor: float = 1.0) -> list[dict[str, Any]]:
    """Split a group into matrices that adapt and the rest, with another rate; an empty part is left out."""
    named = list(zip(group["names"], group["params"], strict=True))
    matrices = {name for name, tensor in named if group["adapt"] and len(shape_of(tensor)) > 1}
    parts = []
    for is_matrix in (True, False):
        some = [(name, tensor) for name, tensor in named if (name in matrices) is is_matrix]
        factor = group.get("lr_factor", 1.0) * (1.0 if is_matrix else vector_lr_factor)
        part = {"names": [n for n, _ in some], "params": [t for _, t in some], "adapt": is_matrix, "lr_factor": factor}
        parts += [{**group, **part}] if some else []
    return parts


def problem_with_count(key: str, value: object) -> str | None:
    if type(value) is int and value >= 1:  # type(): True would count as 1
        return None
    return f"{key} must be a whole number of at least 1, not {value!r}"


def updatable(groups: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], list[Tensor]]]:
    """List each group with the weights that one kernel can update: those with a gradient and at least one element."""
    with_elements = [(group, [w for w in group["params"] if shape_of(w).numel()]) for group in groups]
    return [(group, weights) for group, some in with_elements for weights in by_device_and_dtype(some)]


def sgd_step_(
    optimizer: torch.optim.Optimizer, weights: list[Tensor], group: dict[str, Any], grads: list[Tensor] | None = None
) -> None:
    """Make a group's SGD step along its gradients, or along the given directions."""
    write_(
        weights,
        unscaled_grads(optimizer, weights) if grads is None else grads,
        kept_like(optimizer, weights) if group["momentum"] else [],
        lr=group["lr"],
        overflow=overflow_flag(optimizer, weights[0].device),
        momentum=group["momentum"],
        nesterov=group["nesterov"],
        weight_decay=group["weight_decay"],
    )


def batched_by_shape(tensors: list[Tensor], work: Work) -> list[Tensor]:
    """Return the results of work, called once for all tensors of the same shape, layout, device and dtype."""
    alike: dict[object, list[int]] = defaultdict(list)
    for index, tensor in enumerate(tensors):
        alike[tensor.shape, tensor.stride(), tensor.device, tensor.dtype].append(index)
    results = list(tensors)
    for indices in alike.values():
        for index, found in zip(indices, work([tensors[index] for index in indices]), strict=True):
            results[index] = found
    return results
