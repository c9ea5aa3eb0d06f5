"""Sums of a reducer's fusion buffers over the ranks, in place."""

from collections.abc import Sequence

from torch import Tensor

from bigbatch.comm.backends.base import InFlight
from bigbatch.comm.ranks import Ranks
from bigbatch.parts import load


class PlainSums:
    """Sums the buffers in their own precision; with scatter each rank gets only its part. Same methods as GridSums."""

    align: int = 1
    """Each tensor, and with scatter each rank's part, begins at a multiple of this many elements."""
    element_bytes: int | None = None
    """Bytes per element on the wire; None: those of the gradient."""

    def __init__(self, communicator: Ranks, *, scatter: bool) -> None:
        self._start = communicator.start
        if scatter:
            self._start = load("bigbatch.comm.gradients.scatter_gather.ScatterGather")(
                communicator
            ).start_reduce_scatter

    def lay_out(self, sizes: Sequence[int]) -> None:
        """Do nothing: the buffers need no other memory. Collective."""

    def fold_(self, buffers: Sequence[Tensor]) -> None:
        """Do nothing: backward has added the gradients to the buffers."""

    def start(self, index: int, buffer_N: Tensor, *, label: str) -> InFlight:
        """Start to sum a buffer over the ranks. Collective."""
        return self._start(buffer_N, label=label)

    def start_counts(self) -> InFlight | None:
        """Do nothing: no counts travel apart from the sums. Collective."""
        return None

    def read_(self, buffers: Sequence[Tensor]) -> None:
        """Do nothing: the sums are in the buffers."""

    def zero_(self) -> None:
        """Do nothing: the caller zeroes the buffers."""

    def release(self) -> None:
        """Do nothing: lay_out() has made nothing. Collective."""
