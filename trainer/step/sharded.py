"""The sharded update: each rank updates its part of every fusion buffer, and keeps the state of that part only."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.comm.backends.base import InFlight
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.trainer.optim.matrices import MatrixOptimizer, Part
from bigbatch.trainer.step.precision import Precision
from bigbatch.trainer.step.shard_layout import ShardLayout

STEP = "step"
"""Key of a parameter's update count in an optimizer's state; equal on all ranks."""


def shard_update(
    model: nn.Module,
    precision: Precision,
    reducer: GradientReducer,
    communicator: Communicator,
    *,
    make_optimizer: Callable[[Mapping[str, Tensor]], torch.optim.Optimizer],
    behind_forward: bool = False,
) -> torch.optim.Optimizer:
    """Shard the weights of precision over the ranks; return the optimizer of this rank's share. Collective.

    make_optimizer: (masters by name) -> optimizer over them. behind_forward: as for ShardedWeights.
    """
    shards = ShardedWeights(model, precision.masters, reducer, communicator, behind_forward=behind_forward)
    precision.weights = shards
    optimizer = make_optimizer(shards.masters)
    shard_optimizer_(optimizer, shards)
    return optimizer


class ShardedWeights:
    """Weights of a model that are updated in parts, one per rank; they are MasterWeights.

    The parameters become views of flat buffers that are laid out like the reducer's gradients. fp32 parts are updated
    in place; half-precision ones have fp32 masters and gradients. reducer: made with scatter; if it also has a grid,
    the update has the same bits on any number of ranks.
    behind_forward: publish_ does not wait for the all-gathers. Each module of the model waits, before its forward, for
    the buffers of its own weights. All other code that reads or writes weights calls wait_for_weights first.
    Source: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054), stages 1 and 2 without freeing gradient buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        masters: Mapping[str, Tensor],
        reducer: GradientReducer,
        communicator: Communicator,
        *,
        behind_forward: bool = False,
    ) -> None:
        """Move the model's parameters into the buffers. Raises: ConfigError, as ShardLayout."""
        self.communicator, self.exposed = communicator, reducer.exposed
        self._exact_norms: Callable[..., Tensor] | None = None
        if reducer.grid is not None:
            from bigbatch.trainer.step.reproducible import exact_norms

            self._exact_norms = exact_norms
        self.layout = ShardLayout(model, reducer.plan, communicator)
        own_part = self.layout.scatter_gather.own_part
        sizes = ((grads_N.numel(), grads_N.dtype) for grads_N in reducer.buffers)
        self.buffers = communicator.transport.allocate(*sizes)
        with torch.no_grad():  # before own_part below: its parts are views of these buffers
            for name, parameter in self.layout.parameters.items():
                view = self.layout.whole(name, self.buffers)
                view.copy_(masters[name])
                parameter.data = view
        self._parts = [own_part(buffer_N) for buffer_N in self.buffers]
        self._grads = [own_part(buffer_N) for buffer_N in reducer.buffers]
        self.flat_masters = [part_M if part_M.dtype == torch.float32 else part_M.float() for part_M in self._parts]
        """fp32 masters of this rank's part of each buffer."""
        self._flat_grads = [
            grads_M if grads_M.dtype == torch.float32 else torch.zeros_like(full_M)
            for grads_M, full_M in zip(self._grads, self.flat_masters, strict=True)
        ]
        self.masters: Mapping[str, Tensor] = {name: self._master(name) for name in self.layout.parameters}
        """This rank's pieces of the masters, by the names of the model's parameters."""
        self.replicated: Mapping[str, Tensor] = {}
        self.are_apart = True
        self._gathers: list[InFlight] = []
        self._num_awaited = 0
        self._behind_forward = behind_forward
        if behind_forward:
            self._wait_before_forward(model)
        self.load_(masters)

    def _master(self, name: str) -> Tensor:
        master = Part(self.layout.piece(name, self.flat_masters))
        master.whole_shape = self.layout.parameters[name].size()
        master.grad = self.layout.piece(name, self._flat_grads)
        return master

    def _wait_before_forward(self, model: nn.Module) -> None:
        """Let each module wait for the all-gathers of its own weights before its forward."""
        layout = self.layout
        gather_of = {p: layout.order.index(layout.pieces[name].buffer) + 1 for name, p in layout.parameters.items()}
        for module in model.modules():
            last = max((gather_of.get(p, 0) for p in module.parameters(recurse=False)), default=0)
            if last:
                module.register_forward_pre_hook(lambda *_, num_gathers=last: self.wait_for_weights(num_gathers))

    @torch.no_grad()
    def fetch_grads_(self) -> None:
        """Copy half-precision gradients of this rank's parts into fp32."""
        half = [(f, g) for f, g in zip(self._flat_grads, self._grads, strict=True) if f is not g]
        if half:
            torch._foreach_copy_([f for f, _ in half], [g for _, g in half])

    @torch.no_grad()
    def publish_(self) -> None:
        """Round the masters into this rank's parts, and start to gather all parts; wait_for_weights waits for these."""
        half = [(p, f) for p, f in zip(self._parts, self.flat_masters, strict=True) if p is not f]
        if half:
            torch._foreach_copy_([p for p, _ in half], [f for _, f in half])
        self._gathers = [
            self.layout.scatter_gather.start_all_gather(self.buffers[index], label=f"all-gather of weights {index}")
            # all start before the first wait, so they run one after another without a gap on the wire
            for index in self.layout.order
        ]
        self._num_awaited = 0
        if not self._behind_forward:
            self.wait_for_weights()

    def wait_for_weights(self, num_gathers: int | None = None) -> None:
        """Wait for the first num_gathers all-gathers of publish_; without a number, for all of them.

        Raises: PeerLostError naming the gather.
        """
        last = len(self._gathers) if num_gathers is None else num_gathers
        if self._num_awaited < last:
            with self.exposed.measure(self.buffers):
                self._gathers[last - 1].wait()  # and so for all before it
            self._num_awaited = last

    def norms(self, tensors: list[Tensor]) -> Tensor:
        """Return the norms (N) of whole tensors: squares of pieces add up over ranks in fp64. Collective.

        With a grid, squares are summed as integers: the same bits for any division into pieces.
        """
        if self._exact_norms is not None:
            max_elements = max(p.numel() for p in self.layout.parameters.values())
            together = {"all_maxima": self._all_maxima, "all_sums": self._all_sums}
            return self._exact_norms(tensors, max_elements=max_elements, **together)
        # norms of pieces do not add up, their squares do; the norm of an empty piece is 0
        return self._all_sums(torch.stack(torch._foreach_norm(tensors)).double().square_()).sqrt_().float()

    def _all_maxima(self, peaks_N: Tensor) -> Tensor:
        peaks_PN = peaks_N.new_zeros(self.communicator.world_size * len(peaks_N))
        self.layout.scatter_gather.own_part(peaks_PN).copy_(peaks_N)
        with self.exposed.measure([peaks_PN]):
            self.layout.scatter_gather.all_gather_(peaks_PN, label="all-gather of largest numbers")
        return peaks_PN.view(-1, len(peaks_N)).amax(dim=0)

    def _all_sums(self, squares_N: Tensor) -> Tensor:
        with self.exposed.measure([squares_N]):
            return self.communicator.sum_(squares_N, label="all-reduce of norms")

    def half_grads(self) -> list[Tensor]:
        """List the half-precision gradients of this rank's parts, without padding."""
        grads = [self.layout.piece(name, self._grads) for name in self.layout.pieces]
        return [grads_M for grads_M in grads if grads_M.dtype != torch.float32]

    def sum_parts(self, counts_N: Tensor) -> Tensor:
        """Sum counts_N over ranks. Collective."""
        return self.communicator.sum_(counts_N, label="all-reduce of counts")

    def whole(self) -> dict[str, Tensor]:
        """Return every master, gathered, on the host. Collective."""
        return self.layout.gather(self.flat_masters)

    @torch.no_grad()
    def load_(self, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts into the masters, and publish them. Collective."""
        for name, master in self.masters.items():
            master.copy_(self.layout.piece_of(name, state[name]))
        self.publish_()
        self.wait_for_weights()


def shard_optimizer_(optimizer: torch.optim.Optimizer, weights: ShardedWeights) -> None:
    """Let an optimizer over the masters use norms or matrices of whole tensors, and save whole tensors.

    Its state_dict() and load_state_dict() then return and take whole tensors, and are collective. A copy of the
    optimizer cannot update. Raises: TypeError if it adapts, but has no norms to replace: it would use norms of pieces.
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
        self._buffers.update(zip(new, communicator.transport.allocate(*sizes) if new else [], strict=True))
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
