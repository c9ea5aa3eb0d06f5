"""One step as events: gradients become ready, buffers travel while backward goes on, the update waits. Pure."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from bigbatch.comm.gradients.fusion import BufferPlan, FusionPlan, PlanSizes, TensorSpec
from bigbatch.comm.tuning.plan_search import Backward, PlannedTransfer, simulate
from bigbatch.launch.simulate.constants import BACKWARD_SHARE
from bigbatch.launch.simulate.network import Network
from bigbatch.launch.simulate.shapes import ModelShape

CYCLE_BYTES = 64 * 2**20
"""Horovod's fusion buffer."""


@dataclass(frozen=True)
class InGroups:
    """Gradients travel in so many groups, equal in the number of gradients: 1 waits for all of backward."""

    count: int

    def plan(self, tensors: tuple[TensorSpec, ...]) -> FusionPlan:
        """Cut the gradients."""
        size = math.ceil(len(tensors) / self.count)
        return FusionPlan(tuple(BufferPlan(tensors[i : i + size]) for i in range(0, len(tensors), size)))


@dataclass(frozen=True)
class InCycles:
    """Whatever is ready when the wire is free travels together, up to a buffer's bytes: Horovod's fusion."""

    buffer_bytes: int = CYCLE_BYTES


Fusion = PlanSizes | InGroups | InCycles


@dataclass(frozen=True)
class Compute:
    """Says how long one device computes: seconds_per_image of each picture, and fixed_seconds whatever the batch."""

    seconds_per_image: float
    fixed_seconds: float

    def seconds(self, local_batch: float) -> float:
        """Compute forward, backward and update of so many pictures."""
        return self.seconds_per_image * local_batch + self.fixed_seconds


@dataclass(frozen=True)
class SimulatedStep:
    """Holds where a step's seconds go; `communication` is what backward did not hide."""

    computing: float
    communication: float
    stragglers: float
    input: float
    """Waiting for pictures, where the loaders of a node bring fewer than its devices could train."""
    backward: Backward
    transfers: tuple[PlannedTransfer, ...]

    @property
    def seconds(self) -> float:
        """Return the whole step."""
        return self.computing + self.communication + self.stragglers + self.input


@dataclass(frozen=True)
class Job:
    """Describes what one step of a job does, but for its local batch and its compute."""

    shape: ModelShape
    network: Network
    fusion: Fusion
    element_bytes: int = 4
    """Of a gradient, by which a plan cuts."""
    wire_share: float = 1.0
    """Of these bytes that travel: half, where fp32 gradients travel in half precision."""
    algorithm: str = "native"
    reads_pictures: bool = True
    input_images_per_second: float | None = None
    """That the loaders of a node bring; None where they keep up."""

    def simulate(self, compute: Compute, local_batch: float, *, num_microbatches: int = 1) -> SimulatedStep:
        """Work out one step of so many pictures per device; gradients travel during the last microbatch's backward."""
        each = compute.seconds(local_batch / num_microbatches)
        computing = num_microbatches * each
        backward = backward_of(self.shape, BACKWARD_SHARE * each)
        transfers = self._transfers(backward)
        exposed, stragglers = self._exposed(backward, transfers, computing), self._stragglers(computing)
        waits = self._input(local_batch, busy_seconds=computing + exposed + stragglers)
        return SimulatedStep(computing, exposed, stragglers, waits, backward, transfers)

    def _transfers(self, backward: Backward) -> tuple[PlannedTransfer, ...]:
        network, constants = self.network, self.network.constants
        if network.num_devices == 1 or network.carrier == "servers" or self._is_blocking:
            return ()
        tensors = self.shape.tensors(self.element_bytes)

        def seconds_of(num_bytes: int) -> float:
            return network.seconds(num_bytes * self.wire_share, self.algorithm)

        if not isinstance(self.fusion, InCycles):
            return simulate(self.fusion.plan(tensors), backward, seconds_of)
        per_tensor = constants.host_tensor_seconds if network.carrier == "host" else 0.0
        return in_cycles(
            tensors,
            backward,
            lambda num_bytes, count: seconds_of(num_bytes) + per_tensor * count + constants.cycle_seconds,
            buffer_bytes=self.fusion.buffer_bytes,
        )

    @property
    def _is_blocking(self) -> bool:
        """Say whether nothing hides behind backward."""
        return self.network.carrier == "sockets" and self.network.num_nodes > 1

    def _exposed(self, backward: Backward, transfers: tuple[PlannedTransfer, ...], computing: float) -> float:
        network, constants = self.network, self.network.constants
        num_bytes = self.shape.num_parameters * self.element_bytes * self.wire_share
        doublings = math.log2(network.num_nodes)
        if network.carrier == "servers":
            return max(0.0, network.seconds(num_bytes) - computing)
        if self._is_blocking:
            fixed = constants.socket_step_seconds + constants.socket_node_seconds * doublings
            return fixed + network.seconds(num_bytes)
        if not transfers:
            return 0.0
        exposed = max(0.0, transfers[-1].end_seconds - backward.seconds)
        if network.carrier == "host":
            return exposed + constants.host_node_seconds * doublings
        return exposed + (0.0 if isinstance(self.fusion, InCycles) else constants.launch_seconds * len(transfers))

    def _stragglers(self, computing: float) -> float:
        network, constants = self.network, self.network.constants
        is_shared = network.carrier == "servers"
        each = constants.server_straggler_share if is_shared else constants.straggler_share
        share = each * math.log2(network.num_nodes)
        if self.reads_pictures and network.num_nodes > 1:
            share += constants.input_share
        return share * computing

    def _input(self, local_batch: float, *, busy_seconds: float) -> float:
        """Compute what a step waits for pictures: loaders work ahead, so the slower of the two sets the pace."""
        if self.input_images_per_second is None:
            return 0.0
        node_pictures = local_batch * self.network.devices_per_node
        return max(0.0, node_pictures / self.input_images_per_second - busy_seconds)


def backward_of(shape: ModelShape, seconds: float) -> Backward:
    """Spread a backward's seconds over the gradients."""
    ready = {f"{position}": share * seconds for position, share in enumerate(shape.ready_shares)}
    return Backward(ready, seconds)


def in_cycles(
    tensors: tuple[TensorSpec, ...],
    backward: Backward,
    seconds_of: Callable[[int, int], float],
    *,
    buffer_bytes: int,
) -> tuple[PlannedTransfer, ...]:
    """Send, whenever the wire is free, all gradients that are ready, at least one and at most a buffer.

    seconds_of: of (bytes, number of gradients).
    """
    ready = [backward.ready_seconds[tensor.name] for tensor in tensors]
    transfers: list[PlannedTransfer] = []
    free, first = 0.0, 0
    while first < len(tensors):
        start = max(free, ready[first])
        last, num_bytes = first + 1, tensors[first].num_bytes
        while last < len(tensors) and ready[last] <= start and num_bytes + tensors[last].num_bytes <= buffer_bytes:
            num_bytes += tensors[last].num_bytes
            last += 1
        free = start + seconds_of(num_bytes, last - first)
        transfers.append(PlannedTransfer(num_bytes, ready[last - 1], start, free))
        first = last
    return tuple(transfers)
