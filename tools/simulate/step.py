"""One step as events: gradients become ready, buffers travel while backward continues, the update waits. Pure."""

import math
from dataclasses import dataclass, replace
from typing import Protocol

from bigbatch.comm.gradients.fusion import FusionPlan, TensorSpec
from bigbatch.tools.measure.cost_model import Backward
from bigbatch.tools.simulate.constants import BACKWARD_SHARE
from bigbatch.tools.simulate.network import BY_SIZE, Network
from bigbatch.tools.simulate.plan_search import PlannedTransfer, schedule_transfers
from bigbatch.tools.simulate.shapes import ModelShape

WIDE_BYTES = 4
"""Bytes of an element of a partial sum in fp32."""
SLOW_SHARE = 0.1
"""Share of steps that are slower than slow_seconds."""
EXACT_NODES = 100
"""Number of nodes beyond which a logarithm replaces the sum of 1/n, with an error below 0.005."""
FIT_PRECISION = 1e-4
"""Relative precision of the seconds of an image."""


class Fusion(Protocol):
    """How gradients are grouped."""

    def plan(self, tensors: tuple[TensorSpec, ...], /) -> FusionPlan: ...


@dataclass(frozen=True)
class Compute:
    """Compute time of one device: seconds_per_image of each image, and fixed_seconds at any batch."""

    seconds_per_image: float
    fixed_seconds: float

    def seconds(self, local_batch: float) -> float:
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
    def hidden(self) -> float:
        """Return the seconds of communication that backward hides."""
        return max(0.0, sum(each.end_seconds - each.start_seconds for each in self.transfers) - self.communication)

    @property
    def busy_seconds(self) -> float:
        """Return the seconds without the wait for images."""
        return self.computing + self.communication + self.stragglers

    @property
    def seconds(self) -> float:
        return self.busy_seconds + self.input


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
    all_reduce_time_factor: float = 1.0

    def simulate(self, compute: Compute, local_batch: float, *, num_microbatches: int = 1) -> SimulatedStep:
        """Simulate one step of a local batch per device; gradients travel during the last microbatch's backward."""
        each = compute.seconds(local_batch / num_microbatches)
        computing = num_microbatches * each
        backward = backward_of(self.shape, BACKWARD_SHARE * each)
        if self.network.crosses_sockets:
            backward = replace(backward, ready_seconds=dict.fromkeys(backward.ready_seconds, backward.seconds))
        transfers = self._transfers(backward)
        exposed = self._exposed(backward, transfers, computing)
        network, constants = self.network, self.network.constants
        late = constants.straggler_share
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
        seconds = self.network.seconds(num_bytes * self.wire_share, algorithm, widened=self._widened)
        return self.all_reduce_time_factor * seconds

    def algorithm_of(self, num_bytes: float) -> str:
        if self.algorithm != BY_SIZE:
            return self.algorithm
        return self.network.fastest(num_bytes * self.wire_share, widened=self._widened)

    @property
    def _widened(self) -> float:
        """Return the ratio of the bytes of an fp32 sum to those of a gradient on the wire."""
        return max(1.0, WIDE_BYTES / (self.element_bytes * self.wire_share)) if self.sums_in_fp32 else 1.0

    def _transfers(self, backward: Backward) -> tuple[PlannedTransfer, ...]:
        if self.network.num_devices == 1 or self.network.carrier == "servers":
            return ()
        return schedule_transfers(self.fusion.plan(self.shape.tensors(self.element_bytes)), backward, self.sum_seconds)

    def _exposed(self, backward: Backward, transfers: tuple[PlannedTransfer, ...], computing: float) -> float:
        network, constants = self.network, self.network.constants
        num_bytes = self.shape.num_parameters * self.element_bytes
        doublings = math.log2(network.num_nodes)
        if network.carrier == "servers":
            return max(0.0, self.sum_seconds(num_bytes) - computing)
        if not transfers:
            return 0.0
        exposed = max(0.0, transfers[-1].end_seconds - backward.seconds)
        if network.carrier == "host":
            exposed += constants.host_node_seconds * doublings
        return exposed


def lateness(num_nodes: int) -> float:
    """Return the 90th percentile minus the mean of the maximum of n exponential delays, in units of the mean delay.

    The mean is 1 + 1/2 + ... + 1/n; with probability q the maximum is below -log(1 - q^(1/n)).
    """
    slow = -math.log(-math.expm1(math.log(1 - SLOW_SHARE) / num_nodes))
    exact = sum(1 / n for n in range(1, min(num_nodes, EXACT_NODES) + 1))
    return slow - exact - math.log(max(1.0, num_nodes / EXACT_NODES))


def backward_of(shape: ModelShape, seconds: float) -> Backward:
    """Distribute a backward's seconds over the gradients."""
    ready = {f"{position}": share * seconds for position, share in enumerate(shape.ready_shares)}
    return Backward(ready, seconds)


def fit_compute(
    job: SimulatedJob, fixed_seconds: float, local_batch: float, seconds: float, *, num_microbatches: int = 1
) -> Compute:
    """Find the seconds of an image with which a job's simulated step takes the given seconds."""

    def beyond(each: float) -> float:
        step = job.simulate(Compute(each, fixed_seconds), local_batch, num_microbatches=num_microbatches)
        return step.seconds - seconds

    low, high = 0.0, seconds / local_batch
    under, over = beyond(low), beyond(high)
    if under >= 0:  # even without images the step takes longer
        return Compute(0.0, fixed_seconds)
    while over > FIT_PRECISION * seconds and high - low > FIT_PRECISION * high:
        # a straight line through both ends, as time is nearly proportional to images; at a jump the middle
        middle = low - under * (high - low) / (over - under)
        middle = min(max(middle, 0.9 * low + 0.1 * high), 0.1 * low + 0.9 * high)
        found = beyond(middle)
        low, under, high, over = (low, under, middle, found) if found > 0 else (middle, found, high, over)
        if -FIT_PRECISION * seconds < found <= 0:
            return Compute(middle, fixed_seconds)
    return Compute(high, fixed_seconds)
