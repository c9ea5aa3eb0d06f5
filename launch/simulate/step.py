"""One step as events: gradients become ready, buffers travel while backward goes on, the update waits. Pure."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from bigbatch.comm.gradients.fusion import BufferPlan, FusionPlan, PlanSizes, TensorSpec
from bigbatch.comm.measure.cost_model import Backward
from bigbatch.launch.simulate.constants import BACKWARD_SHARE
from bigbatch.launch.simulate.network import BY_SIZE, Network
from bigbatch.launch.simulate.plan_search import PlannedTransfer, simulate
from bigbatch.launch.simulate.shapes import ModelShape

WIDE_BYTES = 4
"""Bytes of an element of a partial sum in fp32."""
SLOW_SHARE = 0.1
"""Share of steps that are slower than slow_seconds."""
EXACT_NODES = 100
"""Number of nodes beyond which the sum of 1/n is a logarithm, to half a hundredth."""
CYCLE_BYTES = 64 * 2**20
"""Horovod's fusion buffer."""
FIT_PRECISION = 1e-4
"""Relative precision of the seconds of an image."""
NORMAL_90 = 1.645
"""Standard deviations on each side of the 90% interval of a normal distribution."""
RATE_SPREAD = {"ladder": 0.035, "device": 0.07, "other": 0.5}
"""Standard deviation of a device's images per second: between sizes of one system, between systems of one device
(PUBLISHED: 3% of H100, to 20% of A100, between submitters), and where another device stands in its place."""
COMMUNICATION_SPREAD, FIXED_SPREAD, STRAGGLER_SPREAD = 0.6, 0.6, 1.0
"""Standard deviation of each of these parts, as a share of it. ASSUMED, and checked against published rows."""


@dataclass(frozen=True)
class InGroups:
    """Sends gradients in that many groups, equal in the number of gradients: 1 waits for all of backward."""

    count: int

    def plan(self, tensors: tuple[TensorSpec, ...]) -> FusionPlan:
        """Return the plan of these groups."""
        size = math.ceil(len(tensors) / self.count)
        return FusionPlan(tuple(BufferPlan(tensors[i : i + size]) for i in range(0, len(tensors), size)))


@dataclass(frozen=True)
class InCycles:
    """Sends all ready gradients together when the wire is free, up to a buffer's bytes: Horovod's fusion."""

    buffer_bytes: int = CYCLE_BYTES


Fusion = PlanSizes | InGroups | InCycles


@dataclass(frozen=True)
class Compute:
    """Compute time of one device: seconds_per_image of each image, and fixed_seconds at any batch."""

    seconds_per_image: float
    fixed_seconds: float

    def seconds(self, local_batch: float) -> float:
        """Compute forward, backward and update of a batch."""
        return self.seconds_per_image * local_batch + self.fixed_seconds


@dataclass(frozen=True)
class SimulatedStep:
    """Parts of a step's seconds; `communication` is what backward did not hide."""

    computing: float
    communication: float
    stragglers: float
    """Mean; slow_seconds has their spread."""
    input: float
    """Waiting for images, if a node's loaders are slower than its devices."""
    slow_seconds: float
    """Time that one step in ten exceeds, as its latest node is later than on average."""
    backward: Backward
    transfers: tuple[PlannedTransfer, ...]

    @property
    def seconds(self) -> float:
        """Return the whole step."""
        return self.computing + self.communication + self.stragglers + self.input


@dataclass(frozen=True)
class SimulatedJob:
    """One step of a job, without its local batch and its compute."""

    shape: ModelShape
    network: Network
    fusion: Fusion
    element_bytes: int = 4
    """Bytes of a gradient's element, by which a plan cuts."""
    wire_share: float = 1.0
    """Share of these bytes that is sent: half if fp32 gradients are sent in half precision."""
    sums_in_fp32: bool = False
    """Whether half-precision values are summed in fp32: then doubling and a library's own sums send fp32."""
    algorithm: str = "native"
    input_images_per_second: float | None = None
    """Rate of a node's loaders; None if they keep up."""

    def simulate(self, compute: Compute, local_batch: float, *, num_microbatches: int = 1) -> SimulatedStep:
        """Simulate one step of a local batch per device; gradients travel during the last microbatch's backward."""
        each = compute.seconds(local_batch / num_microbatches)
        computing = num_microbatches * each
        backward = backward_of(self.shape, BACKWARD_SHARE * each)
        transfers = self._transfers(backward)
        exposed = self._exposed(backward, transfers, computing)
        network, constants = self.network, self.network.constants
        late = constants.server_straggler_share if network.carrier == "servers" else constants.straggler_share
        share = late * math.log2(network.num_nodes)
        if network.num_nodes > 1:
            share += constants.input_share
        stragglers, waits = share * computing, 0.0
        if self.input_images_per_second is not None:
            # loaders work ahead, so the slower side sets the pace
            loading = local_batch * network.devices_per_node / self.input_images_per_second
            waits = max(0.0, loading - (computing + exposed + stragglers))
        seconds = computing + exposed + stragglers + waits
        slow = seconds + late / math.log(2) * lateness(network.num_nodes) * computing
        return SimulatedStep(computing, exposed, stragglers, waits, slow, backward, transfers)

    def sum_seconds(self, num_bytes: float) -> float:
        """Return the seconds to sum a buffer of that many bytes of gradients."""
        algorithm = self.algorithm_of(num_bytes)
        return self.network.seconds(num_bytes * self.wire_share, algorithm, widened=self._widened)

    def algorithm_of(self, num_bytes: float) -> str:
        """Return the algorithm for such a buffer."""
        if self.algorithm != BY_SIZE:
            return self.algorithm
        return self.network.fastest(num_bytes * self.wire_share, widened=self._widened)

    @property
    def _widened(self) -> float:
        """Return the ratio of the bytes of an fp32 sum to those of a gradient on the wire."""
        return max(1.0, WIDE_BYTES / (self.element_bytes * self.wire_share)) if self.sums_in_fp32 else 1.0

    def _transfers(self, backward: Backward) -> tuple[PlannedTransfer, ...]:
        network, constants = self.network, self.network.constants
        if network.num_devices == 1 or network.carrier == "servers" or self._is_blocking:
            return ()
        tensors = self.shape.tensors(self.element_bytes)

        if not isinstance(self.fusion, InCycles):
            return simulate(self.fusion.plan(tensors), backward, self.sum_seconds)
        per_tensor = constants.host_tensor_seconds if network.carrier == "host" else 0.0
        return in_cycles(
            tensors,
            backward,
            lambda num_bytes, count: self.sum_seconds(num_bytes) + per_tensor * count + constants.cycle_seconds,
            buffer_bytes=self.fusion.buffer_bytes,
        )

    @property
    def _is_blocking(self) -> bool:
        """Return whether nothing hides behind backward."""
        return self.network.carrier == "sockets" and self.network.num_nodes > 1

    def _exposed(self, backward: Backward, transfers: tuple[PlannedTransfer, ...], computing: float) -> float:
        network, constants = self.network, self.network.constants
        num_bytes = self.shape.num_parameters * self.element_bytes * self.wire_share
        doublings = math.log2(network.num_nodes)
        if network.carrier == "servers":
            return max(0.0, network.seconds(num_bytes, widened=self._widened) - computing)
        if self._is_blocking:
            fixed = constants.socket_step_seconds + constants.socket_node_seconds * doublings
            return fixed + network.seconds(num_bytes, widened=self._widened)
        if not transfers:
            return 0.0
        exposed = max(0.0, transfers[-1].end_seconds - backward.seconds)
        if network.carrier == "host":
            return exposed + constants.host_node_seconds * doublings
        return exposed + (0.0 if isinstance(self.fusion, InCycles) else constants.launch_seconds * len(transfers))


def lateness(num_nodes: int) -> float:
    """Return how much later the latest of n nodes is in one step of ten than on average, in delays of one node.

    Delays are exponential: the latest of n has the mean 1 + 1/2 + ... + 1/n, which grows by log(2) with each doubling,
    and stays below -log(1 - q^(1/n)) with probability q.
    """
    slow = -math.log(-math.expm1(math.log(1 - SLOW_SHARE) / num_nodes))
    exact = sum(1 / n for n in range(1, min(num_nodes, EXACT_NODES) + 1))
    return slow - exact - math.log(max(1.0, num_nodes / EXACT_NODES))


def backward_of(shape: ModelShape, seconds: float) -> Backward:
    """Distribute a backward's seconds over the gradients."""
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


def fit_compute(
    job: SimulatedJob, fixed_seconds: float, local_batch: float, seconds: float, *, num_microbatches: int = 1
) -> Compute:
    """Find the seconds of an image with which a job's simulated step takes the given seconds."""
    low, high = 0.0, seconds / local_batch
    while high - low > FIT_PRECISION * high:
        middle = (low + high) / 2
        step = job.simulate(Compute(middle, fixed_seconds), local_batch, num_microbatches=num_microbatches)
        low, high = (low, middle) if step.seconds > seconds else (middle, high)
    return Compute(high, fixed_seconds)


def reach_of(step: SimulatedStep, *, fixed_seconds: float, rate: float, doubt: float = 1.0) -> float:
    """Return the factor below and above a step's seconds of its 90% interval.

    rate: the spread of computing; doubt: of the model's own parts, 1 where no second row has checked them.
    """
    parts = (
        rate,
        doubt * COMMUNICATION_SPREAD * step.communication / step.seconds,
        doubt * FIXED_SPREAD * fixed_seconds / step.seconds,
        doubt * STRAGGLER_SPREAD * step.stragglers / step.seconds,
    )
    return math.exp(NORMAL_90 * math.hypot(*parts))
