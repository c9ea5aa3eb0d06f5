"""Places of a model's weights in flat buffers, of which each rank owns an equal part."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.fusion import FusionPlan, round_up
from bigbatch.comm.gradients.reducer import dense_strides
from bigbatch.comm.gradients.scatter_gather import ScatterGather
from bigbatch.errors import ConfigError
from bigbatch.words import count


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


class ShardLayout:
    """Finds tensors in whole buffers, and pieces of them in this rank's parts of the buffers.

    Raises: ConfigError, on all ranks alike, if the last rank would have no element.
    """

    def __init__(self, model: nn.Module, plan: FusionPlan, communicator: Communicator) -> None:
        self._plan, self._world_size = plan, communicator.world_size
        last = cut(plan, rank=self._world_size - 1, world_size=self._world_size)  # has the fewest of each buffer
        if not any(piece.start < piece.stop for piece in last.values()):
            raise ConfigError(
                f"optimizer.sharded=True leaves the last of {count(self._world_size, 'rank')} no weights, because the "
                "model is too small: set it to false"
            )
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.pieces = cut(plan, rank=communicator.rank, world_size=self._world_size)
        self.order = list(dict.fromkeys(self.pieces[name].buffer for name in self.parameters))
        """Buffers in the order of their use in forward; equal on all ranks."""
        self.scatter_gather = ScatterGather(communicator)

    def whole(self, name: str, buffers: Sequence[Tensor] | Mapping[int, Tensor]) -> Tensor:
        """Return a view of a whole tensor in whole buffers, with its parameter's strides."""
        parameter, piece = self.parameters[name], self.pieces[name]
        return buffers[piece.buffer][piece.first :].as_strided(parameter.size(), dense_strides(parameter))

    def piece(self, name: str, parts: Sequence[Tensor] | Mapping[int, Tensor]) -> Tensor:
        """Return a view of a tensor's piece in this rank's parts of the buffers, flat."""
        piece = self.pieces[name]
        return parts[piece.buffer][piece.start : piece.stop]

    def piece_of(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's piece of a whole tensor, flat."""
        # pieces count elements in memory order (also of channels-last), not in index order
        if whole.stride() != (strides := dense_strides(self.parameters[name])):
            whole = torch.empty_strided(whole.size(), strides, dtype=whole.dtype, device=whole.device).copy_(whole)
        piece, flat_N = self.pieces[name], whole.as_strided((whole.numel(),), (1,))
        return flat_N[piece.offset : piece.offset + piece.stop - piece.start]

    @torch.no_grad()
    def gather(self, parts: Sequence[Tensor]) -> dict[str, Tensor]:
        """Assemble whole tensors from one part of each rank, a buffer at a time, on the host. Collective."""
        tensors = {}
        for index, (part_M, buffer) in enumerate(zip(parts, self._plan.buffers, strict=True)):
            whole_N = part_M.new_empty(part_M.numel() * self._world_size)
            self.scatter_gather.own_part(whole_N).copy_(part_M)
            self.scatter_gather.all_gather_(whole_N, label=f"all-gather of state {index}")
            # only one whole buffer at a time is on the device: all of them would take the memory that sharding saves
            host_N = whole_N.cpu()
            for tensor in buffer.tensors:
                tensors[tensor.name] = self.whole(tensor.name, {index: host_N}).clone()
        return tensors
