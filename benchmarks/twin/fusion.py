"""How other software groups gradients: Horovod's cycles, and groups with equal numbers of gradients. Pure."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from bigbatch.comm.gradients.fusion import BufferPlan, FusionPlan, TensorSpec
from bigbatch.tools.measure.cost_model import Backward
from bigbatch.tools.simulate.plan_search import PlannedTransfer
from bigbatch.tools.simulate.step import Fusion, SimulatedJob

CYCLE_BYTES = 64 * 2**20
"""Horovod's fusion buffer."""
CYCLE_SECONDS = 5e-3
"""Time for which Horovod gathers gradients before each sum. PUBLISHED: its default until 2019."""


@dataclass(frozen=True)
class InGroups:
    """Sends gradients in groups with equal numbers of gradients; a single group waits for all of backward."""

    count: int

    def plan(self, tensors: tuple[TensorSpec, ...]) -> FusionPlan:
        size = math.ceil(len(tensors) / self.count)
        return FusionPlan(tuple(BufferPlan(tensors[i : i + size]) for i in range(0, len(tensors), size)))


@dataclass(frozen=True)
class CycledJob(SimulatedJob):
    """Sends all ready gradients together when the wire is free, up to a buffer's bytes: Horovod's fusion."""

    fusion: Fusion = field(default=InGroups(1), init=False)
    cycle_seconds: float = CYCLE_SECONDS

    def _transfers(self, backward: Backward) -> tuple[PlannedTransfer, ...]:
        if self.network.num_devices == 1 or self.network.carrier == "servers":
            return ()
        fixed = self.all_reduce_time_factor * self.cycle_seconds
        tensors = self.shape.tensors(self.element_bytes)
        return in_cycles(
            tensors, backward, lambda num_bytes: self.sum_seconds(num_bytes) + fixed, buffer_bytes=CYCLE_BYTES
        )


def in_cycles(
    tensors: tuple[TensorSpec, ...],
    backward: Backward,
    seconds_of: Callable[[int], float],
    *,
    buffer_bytes: int,
) -> tuple[PlannedTransfer, ...]:
    """Return the transfers: whenever the wire is free, all ready gradients, at least one and at most a buffer."""
    ready = [backward.ready_seconds[tensor.name] for tensor in tensors]
    sizes = [tensor.num_bytes for tensor in tensors]
    transfers: list[PlannedTransfer] = []
    free, first = 0.0, 0
    while first < len(sizes):
        start = max(free, ready[first])
        last, num_bytes = first + 1, sizes[first]
        while last < len(sizes) and ready[last] <= start and num_bytes + sizes[last] <= buffer_bytes:
            num_bytes += sizes[last]
            last += 1
        free = start + seconds_of(num_bytes)
        transfers.append(PlannedTransfer(num_bytes, ready[last - 1], start, free))
        first = last
    return tuple(transfers)
