"""Predict a recipe on a cluster, at each number of devices: time, losses, cost, energy. Pure."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bigbatch.comm.gradients.fusion import DEFAULT_SIZES, PlanSizes
from bigbatch.errors import ConfigError, SimulationError
from bigbatch.launch.efficiency import Efficiency, MeasuredPoint, Step, efficiency_of
from bigbatch.tools.simulate.cluster import Cluster, Rate
from bigbatch.tools.simulate.interval import RATE_SPREAD, Uncertainty, energy_factors, interval_of
from bigbatch.tools.simulate.network import ALGORITHMS, BY_SIZE, LIBRARY_ALGORITHMS, Network
from bigbatch.tools.simulate.plan_search import PlanChoice, search_plan
from bigbatch.tools.simulate.published import beyond_checked, epochs_to_759, power_of
from bigbatch.tools.simulate.run import Failures, RunTime, time_of_run
from bigbatch.tools.simulate.shapes import shape_of
from bigbatch.tools.simulate.step import Compute, SimulatedJob, SimulatedStep, fit_compute
from bigbatch.tools.simulate.traffic import SentPerStep, sent_per_step
from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import IMAGENET_COUNTS, READERS

IMAGES = IMAGENET_COUNTS["train"]
HALF = ("fp16", "bf16")
"""Precisions with gradients in half precision."""
WIRE_SHARES = {"float16": 0.5, "bfloat16": 0.5}
"""Share of fp32's bytes that is sent, by comm.wire_dtype."""
KNEE_SHARE = 0.5
"""The knee: beyond it, further devices add less than this share of what the first ones do."""


@dataclass(frozen=True)
class Scenario:
    """A recipe, a cluster and the options of a simulation, without the numbers of devices."""

    config: Config
    cluster: Cluster
    rate: Rate | None = None
    compute: Compute | None = None
    """Compute fitted to a measured step; None to use the rate, or the cluster's."""
    algorithm: str | None = None
    """None for the recipe's; there `auto` and `hybrid` mean the fastest known one."""
    num_images: int = IMAGES
    failures: Failures | None = None
    """None if nodes never fail."""
    input_images_per_second: float | None = None
    """Rate of a node's loaders; None to use the cluster's."""


@dataclass(frozen=True)
class Energy:
    """Energy of all devices, with a 90% interval; while they wait, they have the power of training, or less."""

    joules_per_image: float
    low_joules_per_image: float
    high_joules_per_image: float
    kilowatt_hours: float
    """Energy of the whole run."""


@dataclass(frozen=True)
class PredictedPoint:
    """Prediction for one number of devices; low and high are a 90% interval of a step."""

    num_devices: int
    num_nodes: int
    global_batch_size: int
    num_microbatches: int
    local_batch: int
    """Images per step of the devices with the most, for which the others wait."""
    algorithm: str
    step: SimulatedStep
    low_seconds: float
    high_seconds: float
    run: RunTime
    """Time of the recipe's epochs."""
    hours_to_759: float | None
    """Hours until ResNet-50 is at 75.9% top-1, by MLPerf's records of epochs at that batch; None without a record."""
    beyond_checked: str | None
    """What exceeds all published steps; None if nothing does."""
    sent: SentPerStep
    energy: Energy | None
    """None for a device without published power."""

    @property
    def images_per_second(self) -> float:
        return self.global_batch_size / self.step.seconds

    @property
    def hours(self) -> float:
        """Return the hours of the run: steps, evaluations, checkpoints and, if nodes fail, their cost."""
        return self.run.total

    @property
    def device_hours(self) -> float:
        return self.hours * self.num_devices

    def measured(self, *, fewest: int) -> MeasuredPoint:
        step = self.step
        parts = {"computing": step.computing, "communication": step.communication, "input": step.input}
        return MeasuredPoint(
            variant=(),
            ranks=self.num_devices,
            nodes=self.num_nodes,
            global_batch_size=self.global_batch_size,
            step=Step(step.seconds, {**parts, "stragglers": step.stragglers}),
            rates=(self.images_per_second,),
            fewest_ranks=fewest,
            joules_per_image=None,
            device="",
        )


def simulate_scaling(scenario: Scenario, counts: Sequence[int]) -> tuple[list[PredictedPoint], dict[int, str]]:
    """Return predictions by number of devices, and, for numbers that recipe or cluster do not allow, the reason.

    Raises: SimulationError if none of them is possible.
    """
    points, refused = [], {}
    for count in sorted(set(counts)):
        try:
            points.append(simulate_point(scenario, count))
        except (ConfigError, SimulationError) as error:
            refused[count] = str(error).splitlines()[0]
    if not points:
        raise SimulationError(next(iter(refused.values())))
    return points, refused


def fit_to_step(scenario: Scenario, count: int, seconds: float) -> Compute:
    """Return a device's compute with which a step of that many devices takes the measured seconds."""
    config = scenario.config
    num_microbatches = accumulation_steps(config.batch, world_size=count)
    network = scenario.cluster.of_devices(count)
    per_tensor = scenario.cluster.network.constants.seconds_per_tensor
    job = _job(scenario, network, algorithm=_algorithms(scenario)[0])
    fixed = min(per_tensor * len(job.shape.num_elements), seconds / num_microbatches / 2)
    local_batch = num_microbatches * config.batch.microbatch_size
    return fit_compute(job, fixed, local_batch, seconds, num_microbatches=num_microbatches)


def simulate_point(scenario: Scenario, count: int) -> PredictedPoint:
    """Predict one number of devices. Raises: ConfigError or SimulationError if it is not possible."""
    config, batch = scenario.config, scenario.config.batch
    num_microbatches = accumulation_steps(batch, world_size=count)
    network = scenario.cluster.of_devices(count)
    compute = _compute(scenario)
    job = _job(scenario, network)
    local_batch = num_microbatches * batch.microbatch_size
    found = {
        name: replace(job, algorithm=name).simulate(compute, local_batch, num_microbatches=num_microbatches)
        for name in _algorithms(scenario)
    }
    algorithm = min(found, key=lambda name: found[name].seconds)
    step = found[algorithm]
    job, uncertainty = replace(job, algorithm=algorithm), uncertainty_of(scenario)
    interval = interval_of(job, compute, step, local_batch, uncertainty, num_microbatches=num_microbatches)
    run = time_of_run(
        config.run,
        shape=job.shape,
        compute=compute,
        step_seconds=step.seconds,
        steps_per_epoch=scenario.num_images / batch.global_batch_size,
        num_devices=count,
        num_nodes=network.num_nodes,
        failures=scenario.failures,
    )
    energy = None
    if (power := power_of(scenario.cluster.device)) and count % power.num_devices == 0:
        joules = power.watts * count * step.seconds / batch.global_batch_size
        waiting = 1 - step.computing / step.seconds
        low, high = (joules * factor for factor in energy_factors(interval, uncertainty.kind, waiting))
        energy = Energy(joules, low, high, power.watts * count * run.total / 1000)
    has_records = config.model.name == "resnet50" and scenario.num_images == IMAGES
    to_759 = epochs_to_759(batch.global_batch_size) if has_records else None
    return PredictedPoint(
        count,
        network.num_nodes,
        batch.global_batch_size,
        num_microbatches,
        local_batch,
        algorithm,
        step,
        interval.low,
        interval.high,
        run,
        None if to_759 is None else run.total * to_759 / config.run.epochs,
        beyond_checked(config.model.name, count, local_batch / num_microbatches),
        sent_per_step(job, step),
        energy,
    )


def uncertainty_of(scenario: Scenario) -> Uncertainty:
    """Return the spreads for this system: smaller if the user measured the compute rate."""
    if scenario.rate is not None or scenario.compute is not None:
        return Uncertainty(RATE_SPREAD["same_system"], "same_system")
    return Uncertainty(RATE_SPREAD["same_device"], "other_system")


def input_rate(scenario: Scenario) -> float | None:
    """Return the images/s of a node's loaders; None if unknown, or if the recipe's loader reads no files."""
    if scenario.config.data.loader not in READERS:
        return None
    return scenario.input_images_per_second or scenario.cluster.input_images_per_second


@dataclass(frozen=True)
class Advice:
    """A point's step with other settings, in seconds."""

    half_wire_seconds: float | None
    """With fp16 on the wire; None if gradients are halves already."""
    half_wire_options: str
    plan: PlanChoice
    planned_seconds: float


def advise(scenario: Scenario, point: PredictedPoint) -> Advice:
    """Return the step with a better fusion plan, found by search, and with half the bytes on the wire."""
    job = _job(scenario, scenario.cluster.of_devices(point.num_devices), algorithm=point.algorithm)
    compute = _compute(scenario)

    def simulated(changed: SimulatedJob) -> float:
        return changed.simulate(compute, point.local_batch, num_microbatches=point.num_microbatches).seconds

    tensors, stated = job.shape.tensors(job.element_bytes), _sizes(scenario.config)
    plan = search_plan(tensors, point.step.backward, job.sum_seconds, stated=stated)
    is_half = job.element_bytes * job.wire_share <= 2
    # a library's own sum is given fp32 unless it may round each addition
    rounds = point.algorithm in LIBRARY_ALGORITHMS
    half = None if is_half else simulated(replace(job, wire_share=0.5, sums_in_fp32=job.sums_in_fp32 and not rounds))
    options = f"--comm.wire_dtype float16{' --comm.reduce_dtype wire' if rounds else ''}"
    return Advice(half, options, plan, simulated(replace(job, fusion=plan.sizes)))


def efficiencies(points: Sequence[PredictedPoint]) -> list[Efficiency]:
    """Compare each point with the one of the fewest devices, and split its losses."""
    fewest = points[0].num_devices
    measured = [point.measured(fewest=fewest) for point in points]
    return [efficiency_of(each, measured[0]) for each in measured]


def knee(points: Sequence[PredictedPoint]) -> PredictedPoint:
    """Return the last point at which a further device adds at least KNEE_SHARE of what the first ones do."""
    first = points[0].images_per_second / points[0].num_devices
    best = points[0]
    for before, point in itertools.pairwise(points):
        added = (point.images_per_second - before.images_per_second) / (point.num_devices - before.num_devices)
        if added < KNEE_SHARE * first:
            break
        best = point
    return best


def cheapest_within(points: Sequence[PredictedPoint], hours: float) -> PredictedPoint | None:
    """Return the point with the fewest device-hours that ends in time; None if there is none."""
    return min((point for point in points if point.hours <= hours), key=lambda point: point.device_hours, default=None)


def _compute(scenario: Scenario) -> Compute:
    if scenario.compute is not None:
        return scenario.compute
    compute, _ = scenario.cluster.compute(
        shape_of(scenario.config.model), rate=scenario.rate, pixels=scenario.config.data.image_size
    )
    return compute


def _algorithms(scenario: Scenario) -> tuple[str, ...]:
    stated = scenario.algorithm or scenario.config.comm.algorithm
    carrier = scenario.cluster.network.carrier
    if carrier != "nccl":
        if scenario.algorithm not in (None, "native"):
            raise SimulationError(
                f"cluster {scenario.cluster.name} has carrier {carrier}, for which only native is known, not "
                f"{scenario.algorithm}: leave --algorithm or --compare out, or state carrier: nccl in its file"
            )
        return ("native",)
    # a recipe that leaves it open gets the fastest for all buffers; an explicit choice by size is kept
    is_open = stated == "auto" or (stated == BY_SIZE and scenario.algorithm is None)
    return ALGORITHMS if is_open else (stated,)


def _sizes(config: Config) -> PlanSizes:
    comm = config.comm
    return PlanSizes(
        comm.threshold_bytes or DEFAULT_SIZES.threshold_bytes,
        comm.buffer_bytes or DEFAULT_SIZES.buffer_bytes,
        comm.first_buffer_bytes or DEFAULT_SIZES.first_buffer_bytes,
    )


def _job(scenario: Scenario, network: Network, *, algorithm: str = "native") -> SimulatedJob:
    config = scenario.config
    is_half = config.optimizer.precision in HALF
    # only fp32 gradients are sent in comm.wire_dtype
    wire = None if is_half else config.comm.wire_dtype
    return SimulatedJob(
        shape_of(config.model),
        network,
        _sizes(config),
        element_bytes=2 if is_half else 4,
        wire_share=WIRE_SHARES[wire] if wire else 1.0,
        sums_in_fp32=config.comm.reduce_dtype == "fp32",
        algorithm=algorithm,
        input_images_per_second=input_rate(scenario),
    )
