"""An optimizer of sharded weights: its norms, matrices and saved state are those of whole tensors."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bigbatch.trainer.optim.matrices import MatrixOptimizer
from bigbatch.trainer.step.sharded import ShardedWeights

STEP = "step"
"""Key of a parameter's update count in an optimizer's state; equal on all ranks."""


def shard_optimizer_(optimizer: torch.optim.Optimizer, weights: ShardedWeights) -> None:
    """Let an optimizer over the masters use norms or matrices of whole tensors, and save whole tensors.

    Its state_dict() and load_state_dict() then return and take whole tensors, and are collective. A copy of the
    optimizer cannot update.
    Raises: TypeError if it adapts, but has no norms to replace: it would use norms of pieces.
    """
    if isinstance(optimizer, MatrixOptimizer):
        optimizer.wholes = GatheredMatrices(weights)
    elif hasattr(optimizer, "norms"):
        optimizer.norms = weights.norms
    elif "adapt" in optimizer.defaults:
        raise TypeError(f"{type(optimizer).__name__} adapts, but has no attribute norms: take them as LARS does")
    optimizer.register_state_dict_post_hook(partial(_gather_state, weights))
    optimizer.register_load_state_dict_pre_hook(partial(_cut_state, weights))


class GatheredMatrices:
    """A Gatherer of whole matrices from the ranks' pieces, in fp32 buffers that the next call overwrites."""

    def __init__(self, weights: ShardedWeights) -> None:
        self._weights = weights
        self._names = {master: name for name, master in weights.masters.items()}
        self._buffers: dict[int, Tensor] = {}
        """Index of a fusion buffer -> buffer of the same layout."""

    def gather(self, weights: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
        """weights: some of the masters, the same on all ranks."""
        if not weights:
            return []
        layout, communicator = self._weights.layout, self._weights.communicator
        names = [self._names[weight] for weight in weights]
        indices = sorted({layout.pieces[name].buffer for name in names})
        new = [index for index in indices if index not in self._buffers]
        sizes = [(self._weights.buffers[index].numel(), torch.float32) for index in new]
        self._buffers.update(zip(new, communicator.allocate_all(sizes) if new else [], strict=True))
        buffers = {index: self._buffers[index] for index in indices}
        own = {index: layout.scatter_gather.own_part(buffer_N) for index, buffer_N in buffers.items()}
        torch._foreach_copy_([layout.piece(name, own) for name in names], parts)
        gathers = [
            layout.scatter_gather.start_all_gather(buffer_N, label=f"all-gather of matrices {index}")
            for index, buffer_N in buffers.items()
        ]
        with self._weights.exposed.measure(list(buffers.values())):
            for gather in gathers:
                gather.wait()
        return [layout.whole(name, buffers) for name in names]

    def own(self, weights: list[Tensor], wholes: list[Tensor]) -> list[Tensor]:
        piece_of = self._weights.layout.piece_of
        return [piece_of(self._names[weight], whole) for weight, whole in zip(weights, wholes, strict=True)]


def _gather_state(
    weights: ShardedWeights, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Return the state with whole tensors in place of pieces. Collective."""
    names, replicated = _names(state_dict), _replicated(optimizer)
    states = {index: dict(state) for index, state in state_dict["state"].items()}
    # a dict keeps the order, a set would not: all ranks gather the same key at the same time
    keys = {key: None for state in states.values() for key in state if key not in replicated}
    for key in keys:
        parts = [torch.zeros_like(full_M) for full_M in weights.flat_masters]
        for index, state in states.items():
            weights.layout.piece(names[index], parts).copy_(state[key])
        whole = weights.layout.gather(parts)
        for index, state in states.items():
            state[key] = whole[names[index]]
    return {**state_dict, "state": states}


def _cut_state(weights: ShardedWeights, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the state with this rank's pieces in place of whole tensors."""
    names, replicated, piece_of = _names(state_dict), _replicated(optimizer), weights.layout.piece_of
    states = {
        index: {
            key: value if key in replicated else piece_of(names[index], value).clone() for key, value in state.items()
        }
        for index, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def _replicated(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """List the keys of an optimizer's state that are equal on all ranks, and not of the weights' shapes."""
    return (STEP, *(optimizer.replicated_state if isinstance(optimizer, MatrixOptimizer) else ()))


def _names(state_dict: Mapping[str, Any]) -> dict[int, str]:
    groups = state_dict["param_groups"]
    return {number: name for group in groups for number, name in zip(group["params"], group["names"], strict=True)}
