"""The sharded update: each rank updates its part of every fusion buffer, and keeps the state of that part only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.comm.backends.base import InFlight
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.fusion import FusionPlan, round_up
from bigbatch.comm.gradients.reducer import GradientReducer, dense_strides
from bigbatch.comm.gradients.scatter_gather import ScatterGather
from bigbatch.errors import ConfigError
from bigbatch.trainer.optim.matrices import MatrixOptimizer, Part
from bigbatch.trainer.step.exact_norms import exact_norms

STEP = "step"
"""Key of a parameter's update count in an optimizer's state; equal on all ranks."""


@dataclass(frozen=True)
class Piece:
    """A rank's piece of a tensor. Elements of a tensor count in memory order.

    Each rank has a piece of every tensor, most of them empty, so that all ranks run the same operations.
    """

    buffer: int
    first: int
    """Start of the tensor in its buffer."""
    start: int
    """Start of the piece in the rank's part of the buffer."""
    stop: int
    """End of the piece there."""
    offset: int
    """Start of the piece in the tensor."""


def cut(plan: FusionPlan, *, rank: int, world_size: int) -> dict[str, Piece]:
    """Return a rank's piece of each tensor. The rank owns part number rank of world_size equal parts of each buffer."""
    pieces = {}
    for index, buffer in enumerate(plan.buffers):
        # rounded up, so parts are equal; the last ones may reach beyond the buffer's end
        part = round_up(buffer.num_elements, world_size * buffer.align) // world_size
        low, high = rank * part, (rank + 1) * part
        for tensor, first in buffer.places():
            # both clamped into the part: a tensor that lies outside of it gets an empty piece
            start = min(max(first, low), high)
            stop = min(max(first + tensor.num_elements, low), high)
            pieces[tensor.name] = Piece(index, first, start - low, stop - low, start - first if start < stop else 0)
    return pieces


class ShardedWeights:
    """Weights of a model that are updated in parts, one per rank; with the methods of WholeWeights and Wholes.

    The parameters become views of flat buffers that are laid out like the reducer's gradients. fp32 parts are updated
    in place; half-precision ones have fp32 masters and gradients. reducer: made with scatter; if it also has a grid,
    the update has the same bits on any number of ranks.
    behind_forward: publish_ does not wait for the all-gathers. Each module of the model waits, before its forward, for
    the buffers of its own weights. All other code that reads or writes weights calls settle first.
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
        """Move the model's parameters into the buffers.

        Raises: ConfigError, on all ranks alike, if the last rank would have no element.
        """
        world_size = communicator.world_size
        # the last rank has the fewest elements of each buffer
        if not any(
            each.start < each.stop for each in cut(reducer.plan, rank=world_size - 1, world_size=world_size).values()
        ):
            raise ConfigError(
                f"optimizer.sharded=True leaves the last of {world_size} ranks no share of so small a model: set it to "
                "false"
            )
        self._communicator = communicator
        self._exposed = reducer.exposed
        self._is_exact = reducer.grid is not None
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._plan = reducer.plan
        self._pieces = cut(self._plan, rank=communicator.rank, world_size=world_size)
        self._scatter_gather = ScatterGather(communicator)
        own_part = self._scatter_gather.own_part
        self._buffers = communicator.allocate_all([(grads_N.numel(), grads_N.dtype) for grads_N in reducer.buffers])
        with torch.no_grad():  # before own_part below: its parts are views of these buffers
            for name, parameter in self._parameters.items():
                view = self._view(name, self._buffers)
                view.copy_(masters[name])
                parameter.data = view
        self._parts = [own_part(buffer_N) for buffer_N in self._buffers]
        self._grads = [own_part(buffer_N) for buffer_N in reducer.buffers]
        self._full = [part_M if part_M.dtype == torch.float32 else part_M.float() for part_M in self._parts]
        self._full_grads = [
            grads_M if grads_M.dtype == torch.float32 else torch.zeros_like(full_M)
            for grads_M, full_M in zip(self._grads, self._full, strict=True)
        ]
        self._order = list(dict.fromkeys(self._pieces[name].buffer for name in self._parameters))
        """Buffers in the order of their use in forward, in which ranks gather them; equal on all ranks."""
        self._gathers: list[InFlight] = []
        self._num_settled = 0
        self._behind_forward = behind_forward
        if behind_forward:  # each module waits for its own weights before its forward
            brought_by = {p: self._order.index(self._pieces[name].buffer) + 1 for name, p in self._parameters.items()}
            for module in model.modules():
                last = max((brought_by.get(p, 0) for p in module.parameters(recurse=False)), default=0)
                if last:
                    module.register_forward_pre_hook(lambda *_, num_gathers=last: self.settle(num_gathers))
        self.masters: Mapping[str, Tensor] = {name: self._master(name) for name in self._parameters}
        """This rank's parts, in fp32, by the names of the model's parameters."""
        self._names = {master: name for name, master in self.masters.items()}
        self._wholes: dict[int, Tensor] = {}
        """Index of a fusion buffer -> fp32 buffer in which its whole matrices are gathered."""
        self.replicated: Mapping[str, Tensor] = {}
        self.load_(masters)

    def _view(self, name: str, buffers: Sequence[Tensor] | Mapping[int, Tensor]) -> Tensor:
        """Return a view of a whole tensor in whole buffers, with its parameter's strides."""
        parameter = self._parameters[name]
        piece = self._pieces[name]
        return buffers[piece.buffer][piece.first :].as_strided(parameter.size(), dense_strides(parameter))

    def _master(self, name: str) -> Tensor:
        piece = self._pieces[name]
        master = Part(self._full[piece.buffer][piece.start : piece.stop])
        master.whole_shape = self._parameters[name].size()
        master.grad = self._full_grads[piece.buffer][piece.start : piece.stop]
        return master

    @torch.no_grad()
    def fetch_grads_(self) -> None:
        """Copy half-precision gradients of this rank's parts into fp32."""
        half = [(f, g) for f, g in zip(self._full_grads, self._grads, strict=True) if f is not g]
        if half:
            torch._foreach_copy_([f for f, _ in half], [g for _, g in half])

    @torch.no_grad()
    def publish_(self) -> None:
        """Round the masters into this rank's parts, and start to gather all ranks' parts; settle waits for these."""
        half = [(p, f) for p, f in zip(self._parts, self._full, strict=True) if p is not f]
        if half:
            torch._foreach_copy_([p for p, _ in half], [f for _, f in half])
        self._gathers = [
            self._scatter_gather.start_all_gather(self._buffers[index], label=f"all-gather of weights {index}")
            # all start before the first wait, so they run one after another without a gap on the wire
            for index in self._order
        ]
        self._num_settled = 0
        if not self._behind_forward:
            self.settle()

    def settle(self, num_gathers: int | None = None) -> None:
        """Wait for the first num_gathers all-gathers of publish_; without a number, for all of them.

        Raises: PeerLostError naming the gather.
        """
        last = len(self._gathers) if num_gathers is None else num_gathers
        if self._num_settled < last:
            with self._exposed.measure(self._buffers):
                self._gathers[last - 1].wait()  # and so for all before it
            self._num_settled = last

    def norms(self, tensors: list[Tensor]) -> Tensor:
        """Return the norms (N) of whole tensors: squares of pieces add up over ranks in fp64. Collective.

        With a grid, squares are summed as integers: the same bits for any division into pieces.
        """
        if self._is_exact:
            most_elements = max(p.numel() for p in self._parameters.values())
            return exact_norms(
                tensors, most_elements=most_elements, all_maxima=self._all_maxima, all_sums=self._all_sums
            )
        # norms of pieces do not add up, their squares do; the norm of an empty piece is 0
        return self._all_sums(torch.stack(torch._foreach_norm(tensors)).double().square_()).sqrt_().float()

    def _all_maxima(self, peaks_N: Tensor) -> Tensor:
        peaks_PN = peaks_N.new_zeros(self._communicator.world_size * len(peaks_N))
        self._scatter_gather.own_part(peaks_PN).copy_(peaks_N)
        with self._exposed.measure([peaks_PN]):
            self._scatter_gather.all_gather_(peaks_PN, label="all-gather of largest numbers")
        return peaks_PN.view(-1, len(peaks_N)).amax(dim=0)

    def _all_sums(self, squares_N: Tensor) -> Tensor:
        with self._exposed.measure([squares_N]):
            return self._communicator.sum_(squares_N, label="all-reduce of norms")

    def gather(self, weights: list[Tensor], parts: list[Tensor]) -> list[Tensor]:
        """Gather whole tensors from the ranks' parts, in reused fp32 buffers. Collective.

        The next call overwrites them. weights: some of the masters, the same on all ranks.
        """
        if not weights:
            return []
        names = [self._names[weight] for weight in weights]
        indices = sorted({self._pieces[name].buffer for name in names})
        new = [index for index in indices if index not in self._wholes]
        sizes = [(self._buffers[index].numel(), torch.float32) for index in new]
        self._wholes.update(zip(new, self._communicator.allocate_all(sizes) if new else [], strict=True))
        own = {index: self._scatter_gather.own_part(self._wholes[index]) for index in indices}
        places = [self._pieces[name] for name in names]
        torch._foreach_copy_([own[piece.buffer][piece.start : piece.stop] for piece in places], parts)
        gathers = [
            self._scatter_gather.start_all_gather(self._wholes[index], label=f"all-gather of matrices {index}")
            for index in indices
        ]
        with self._exposed.measure([self._wholes[index] for index in indices]):
            for gather in gathers:
                gather.wait()
        return [self._view(name, self._wholes) for name in names]

    def own(self, weights: list[Tensor], wholes: list[Tensor]) -> list[Tensor]:
        return [self._piece_of(self._names[weight], whole) for weight, whole in zip(weights, wholes, strict=True)]

    def half_grads(self) -> list[Tensor]:
        """List the half-precision gradients of this rank's parts, without padding."""
        half = {index for index, grads_M in enumerate(self._grads) if grads_M.dtype != torch.float32}
        pieces = [piece for piece in self._pieces.values() if piece.buffer in half]
        return [self._grads[piece.buffer][piece.start : piece.stop] for piece in pieces]

    def sum_parts(self, counts_N: Tensor) -> Tensor:
        """Sum counts_N over ranks. Collective."""
        return self._communicator.sum_(counts_N, label="all-reduce of counts")

    def is_finite(self) -> bool:
        """Return whether every element of the masters is finite, on any rank. Collective."""
        odd_N = torch.stack([~full_M.isfinite().all() for full_M in self._full])
        return not self.sum_parts(odd_N.double()).any()

    def whole(self) -> dict[str, Tensor]:
        """Return every master, gathered, on the host. Collective."""
        return self._gather(self._full)

    @torch.no_grad()
    def load_(self, state: Mapping[str, Tensor]) -> None:
        """Copy this rank's parts into the masters, and publish them. Collective."""
        for name, master in self.masters.items():
            master.copy_(self._piece_of(name, state[name]))
        self.publish_()
        self.settle()

    def _piece_of(self, name: str, whole: Tensor) -> Tensor:
        parameter, piece = self._parameters[name], self._pieces[name]
        # pieces count elements in memory order (also of channels-last), not in index order
        if whole.stride() != (strides := dense_strides(parameter)):
            whole = torch.empty_strided(whole.size(), strides, dtype=whole.dtype, device=whole.device).copy_(whole)
        flat_N = whole.as_strided((whole.numel(),), (1,))
        return flat_N[piece.offset : piece.offset + piece.stop - piece.start]

    @torch.no_grad()
    def _gather(self, parts: list[Tensor]) -> dict[str, Tensor]:
        """Assemble whole tensors from one part of each rank, a buffer at a time, on the host."""
        tensors = {}
        for index, (part_M, buffer) in enumerate(zip(parts, self._plan.buffers, strict=True)):
            whole_N = part_M.new_empty(part_M.numel() * self._communicator.world_size)
            self._scatter_gather.own_part(whole_N).copy_(part_M)
            self._scatter_gather.all_gather_(whole_N, label=f"all-gather of state {index}")
            # only one whole buffer at a time is on the device: all of them would take the memory that sharding saves
            host_N = whole_N.cpu()
            for tensor in buffer.tensors:
                tensors[tensor.name] = self._view(tensor.name, {index: host_N}).clone()
        return tensors

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Let an optimizer over the masters use norms or matrices of whole tensors, and save whole tensors.

        Its state_dict() and load_state_dict() then return and take whole tensors, and are collective. A copy of the
        optimizer cannot update.
        Raises: TypeError if it adapts, but has no norms to replace: it would use norms of pieces.
        """
        if isinstance(optimizer, MatrixOptimizer):
            optimizer.wholes = self
        elif hasattr(optimizer, "norms"):
            optimizer.norms = self.norms
        elif "adapt" in optimizer.defaults:
            raise TypeError(f"{type(optimizer).__name__} adapts, but has no attribute norms: take them as LARS does")
        optimizer.register_state_dict_post_hook(self._whole_state)
        optimizer.register_load_state_dict_pre_hook(self._own_state)

    def _whole_state(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        names, as_they_are = _names(state_dict), _replicated(optimizer)
        states = {index: dict(state) for index, state in state_dict["state"].items()}
        # a dict keeps the order, a set would not: all ranks gather the same key at the same time
        keys = {key: None for state in states.values() for key in state if key not in as_they_are}
        for key in keys:
            parts = [torch.zeros_like(full_M) for full_M in self._full]
            for index, state in states.items():
                piece = self._pieces[names[index]]
                parts[piece.buffer][piece.start : piece.stop] = state[key]
            whole = self._gather(parts)
            for index, state in states.items():
                state[key] = whole[names[index]]
        return {**state_dict, "state": states}

    def _own_state(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        names, as_they_are = _names(state_dict), _replicated(optimizer)
        states = {
            index: {
                key: value if key in as_they_are else self._piece_of(names[index], value).clone()
                for key, value in state.items()
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
