"""What an experiment is: frozen dataclasses without defaults, so that one complete YAML says everything."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

from bigbatch.trainer.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Where the run goes, how long it lasts, what it writes."""

    directory: str
    """Run folder for config, metrics, checkpoints, plot and summary."""
    seed: int
    """Seed of weights, sample order and every draw of the input."""
    epochs: int
    """Passes over the training set."""
    log_every_steps: int
    """Steps between two reports (sums over ranks, one host sync)."""
    eval_every_epochs: int
    """Epochs between two evaluations; the last epoch is always evaluated."""
    checkpoint_every_steps: int
    """Steps between two checkpoints, besides the one after each evaluation; 0 for those alone."""
    keep_checkpoints: int
    """Newest checkpoints to keep, besides the best."""
    resume: str
    """auto: go on from the newest checkpoint of the run folder, if any; never: refuse a used run folder;
    else the path of a checkpoint to start from."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The pictures and what is done to them."""

    loader: Literal["dali", "torchvision", "resident", "synthetic"]
    """dali: decode and resize ahead, on the GPU where there is one; torchvision: the same in Pillow threads;
    resident: whole set decoded once on the device; synthetic: generated tensors, for measuring."""
    root: str
    """Folder with train/<class>/<picture> and val/<class>/<picture>; unused by synthetic."""
    num_classes: int
    """Classes of the data set and outputs of the model."""
    num_synthetic_samples: int | None
    """Size of the generated training set and of the validation set; null for every other loader."""
    image_size: int
    """Height and width of the pictures that the model sees, in pixels."""
    crop: Literal["resized", "padded"]
    """Training crop. resized: random area and aspect ratio (ImageNet); padded: shift by up to 4 pixels (CIFAR)."""
    crop_area_min: float | None
    """Smallest share of the picture's area in a resized crop, in (0, 1]; null for padded."""
    flip: bool
    """Mirror half of the training pictures."""
    eval_crop_fraction: float
    """Side of the central evaluation crop as a share of the picture's shorter side, in (0, 1]."""
    mean: tuple[float, float, float]
    """Channel means (red, green, blue) on the scale 0 to 1."""
    std: tuple[float, float, float]
    """Channel standard deviations (red, green, blue) on the scale 0 to 1."""
    num_threads: int
    """Decoding threads per rank."""
    prefetch_batches: int
    """Microbatches prepared ahead of use."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The classifier."""

    name: Literal["resnet18", "resnet34", "resnet50", "resnet101", "resnet152", "alexnet_bn", "resnet9"]
    """Architecture; the ResNets are v1.5, resnet9 is David Page's."""
    width: int | None
    """Channels of resnet9's first layer; null for every other model."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The batch is global: any number of ranks gives the same update."""

    global_batch_size: int
    """Samples per update, over all ranks and accumulation steps."""
    microbatch_size: int
    """Samples per rank per forward pass; accumulation steps follow from it."""
    bn_span: int
    """Samples over which batch norm takes its statistics (a ghost batch); divides microbatch_size."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update. Bias and batch norm neither decay nor adapt."""

    name: Literal["lars", "sgd"]
    """lars, or sgd with Nesterov momentum."""
    momentum: float
    """Share of the last update that is kept, in [0, 1)."""
    weight_decay: float
    """L2 decay of weights, not of bias and batch norm."""
    trust_coefficient: float | None
    """LARS eta; null for sgd."""
    eps: float | None
    """Added to the denominator of the LARS trust ratio; null for sgd."""
    momentum_form: Literal["lr_inside", "lr_outside"] | None
    """lr_inside: the MLPerf reference; lr_outside: NVIDIA's; null for sgd."""
    label_smoothing: float
    """Share of the target spread over all classes, in [0, 1)."""
    precision: Literal["fp32", "bf16", "fp16"]
    """Weights, activations and gradients; master weights, update and batch norm are fp32 always. On a GPU, fp32
    convolutions use TF32, torch's default."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate as a pure function of the step; linear warm-up from 0."""

    name: Literal["polynomial", "cosine", "step", "one_cycle"]
    """Form of the decay after the warm-up."""
    base_lr: float
    """Learning rate at the end of the warm-up."""
    warmup_epochs: float
    """Length of the warm-up, in epochs."""
    end_lr: float | None
    """Learning rate at the last step; null for step."""
    power: float | None
    """Exponent of the polynomial; null for every other form."""
    milestone_epochs: tuple[float, ...] | None
    """Epochs at which step multiplies the rate by gamma; null for every other form."""
    gamma: float | None
    """Factor at each milestone; null for every form but step."""


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """Gradients over the wire."""

    backend: Literal["auto", "nccl", "tcp", "gloo", "mpi", "horovod"]
    """auto: NCCL where every rank has a GPU, else tcp."""
    interface: str | None
    """Network interface between the nodes, such as eth0; null for the one that leads to rank 0."""
    algorithm: Literal["native", "ring", "hierarchical", "sharded", "doubling", "hybrid"]
    """native: the backend's own; hierarchical: reduce to a leader per node, ring of leaders, broadcast;
    sharded: reduce-scatter in the node, all-reduce across, all-gather in the node; doubling: leaders sum by recursive
    doubling; hybrid: by the size of the buffer, as table says."""
    table: str | None
    """File that `bigbatch comm tune` made for this cluster and model; null for none."""
    group_size: int | None
    """Ranks per node group; null for one group per host."""
    wire_dtype: Literal["float16", "bfloat16"] | None
    """Precision of fp32 gradients between ranks; null for their own."""
    predivide: float
    """Gradients are divided by this before a sum in wire_dtype and multiplied after, against overflow."""
    threshold_bytes: int | None
    """Gradients larger than this travel alone; null for what table says."""
    buffer_bytes: int | None
    """Largest fusion buffer; null for what table says."""
    first_buffer_bytes: int | None
    """Size of the first buffer; null for what table says, or the same as the others."""
    warn_seconds: float
    """Ranks that others have waited for so long are named."""
    timeout_seconds: float
    """A peer that does not answer for this long ends the job."""
    timeline_steps: tuple[int, int] | None
    """First and last step to record into timeline.json in the run's folder; null for none."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment, complete. Raises: ConfigError naming the key, the value and a legal one."""

    run: RunConfig
    data: DataConfig
    model: ModelConfig
    batch: BatchConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    comm: CommConfig

    def __post_init__(self) -> None:
        _check_ranges(self)
        _check_batch(self.batch)
        _check_choices(self)
        _check_loader(self.data)
        _check_image_size(self)
        _check_schedule(self.schedule, epochs=self.run.epochs)
        _check_comm(self.comm)


POSITIVE = (
    "run.epochs",
    "run.log_every_steps",
    "run.eval_every_epochs",
    "run.keep_checkpoints",
    "data.num_classes",
    "data.num_synthetic_samples",
    "data.image_size",
    "data.std",
    "data.num_threads",
    "data.prefetch_batches",
    "model.width",
    "batch.global_batch_size",
    "batch.microbatch_size",
    "batch.bn_span",
    "optimizer.trust_coefficient",
    "schedule.base_lr",
    "schedule.power",
    "schedule.gamma",
    "comm.group_size",
    "comm.threshold_bytes",
    "comm.buffer_bytes",
    "comm.first_buffer_bytes",
    "comm.predivide",
    "comm.warn_seconds",
    "comm.timeout_seconds",
)
NOT_NEGATIVE = (
    "run.seed",
    "run.checkpoint_every_steps",
    "data.mean",
    "optimizer.weight_decay",
    "optimizer.eps",
    "schedule.warmup_epochs",
    "schedule.end_lr",
    "schedule.milestone_epochs",
    "comm.timeline_steps",
)
SHARE_WITH_ONE = ("data.crop_area_min", "data.eval_crop_fraction")
SHARE_BELOW_ONE = ("optimizer.momentum", "optimizer.label_smoothing")

ONLY_FOR = {
    # key: (the key that decides, its values for which this key must be given)
    "data.num_synthetic_samples": ("data.loader", ("synthetic",)),
    "data.crop_area_min": ("data.crop", ("resized",)),
    "model.width": ("model.name", ("resnet9",)),
    "optimizer.trust_coefficient": ("optimizer.name", ("lars",)),
    "optimizer.eps": ("optimizer.name", ("lars",)),
    "optimizer.momentum_form": ("optimizer.name", ("lars",)),
    "schedule.end_lr": ("schedule.name", ("polynomial", "cosine", "one_cycle")),
    "schedule.power": ("schedule.name", ("polynomial",)),
    "schedule.milestone_epochs": ("schedule.name", ("step",)),
    "schedule.gamma": ("schedule.name", ("step",)),
}

SMALLEST_IMAGE = {"resnet9": 8, "alexnet_bn": 63}
"""Pixels a side that a model needs to reach its last pooling; the ResNets take any."""


def lookup(config: Config, key: str) -> object:
    """The value of a dotted key."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _check_ranges(config: Config) -> None:
    for keys, legal, is_legal in (
        (POSITIVE, "positive and finite", lambda v: 0 < v < math.inf),
        (NOT_NEGATIVE, "0 or more, and finite", lambda v: 0 <= v < math.inf),
        (SHARE_WITH_ONE, "above 0 and at most 1", lambda v: 0 < v <= 1),
        (SHARE_BELOW_ONE, "at least 0 and below 1", lambda v: 0 <= v < 1),
        (("run.seed",), "below 2**63", lambda v: v < 2**63),
    ):
        for key in keys:
            value = lookup(config, key)
            numbers = value if isinstance(value, tuple) else (value,)
            if value is not None and not all(map(is_legal, numbers)):
                raise ConfigError(f"{key}={value} must be {legal}")


def _check_choices(config: Config) -> None:
    for key, (decider, values) in ONLY_FOR.items():
        value, choice = lookup(config, key), lookup(config, decider)
        if choice in values and value is None:
            raise ConfigError(f"{key} is null, but {decider}={choice} needs it: give a value")
        if choice not in values and value is not None:
            raise ConfigError(f"{key}={value} has no meaning with {decider}={choice}: set it to null")


def _check_loader(data: DataConfig) -> None:
    if (data.loader == "resident") != (data.crop == "padded"):
        raise ConfigError(
            f"data.crop={data.crop} does not go with data.loader={data.loader}: resident takes padded crops, the "
            "other loaders take resized ones"
        )
    if data.loader == "resident" and data.eval_crop_fraction != 1:
        raise ConfigError(
            f"data.eval_crop_fraction={data.eval_crop_fraction} does not go with data.loader=resident, which does "
            "not resize: set it to 1.0"
        )


def _check_image_size(config: Config) -> None:
    smallest = SMALLEST_IMAGE.get(config.model.name, 1)
    if config.data.image_size < smallest:
        raise ConfigError(
            f"data.image_size={config.data.image_size} is too small for model.name={config.model.name}: give at "
            f"least {smallest}"
        )


def _check_schedule(schedule: ScheduleConfig, *, epochs: int) -> None:
    warmup, milestones = schedule.warmup_epochs, schedule.milestone_epochs or ()
    if warmup > epochs:
        raise ConfigError(f"schedule.warmup_epochs={warmup} is longer than run.epochs={epochs}")
    if schedule.end_lr is not None and schedule.end_lr > schedule.base_lr:
        raise ConfigError(
            f"schedule.end_lr={schedule.end_lr} exceeds schedule.base_lr={schedule.base_lr}: give at most that"
        )
    rising = tuple(sorted({m for m in milestones if m >= warmup}))
    if milestones != rising:
        raise ConfigError(
            f"schedule.milestone_epochs={list(milestones)} must rise from schedule.warmup_epochs={warmup} on: "
            f"{list(rising)} does"
        )


def _check_comm(comm: CommConfig) -> None:
    if comm.table is None:
        for key, value in (("threshold_bytes", comm.threshold_bytes), ("buffer_bytes", comm.buffer_bytes)):
            if value is None:
                raise ConfigError(f"comm.{key} is null, which means as comm.table says, and that is null, too")
        if comm.algorithm == "hybrid":
            raise ConfigError(
                "comm.algorithm=hybrid chooses by comm.table, which is null: make one with bigbatch comm tune"
            )
    if comm.wire_dtype is None and comm.predivide != 1:
        raise ConfigError(
            f"comm.predivide={comm.predivide} has no meaning without comm.wire_dtype: set it to 1.0, or wire_dtype "
            "to float16"
        )
    if comm.timeline_steps and comm.timeline_steps[0] > comm.timeline_steps[1]:
        raise ConfigError(f"comm.timeline_steps={list(comm.timeline_steps)} must be the first and the last step")


def _check_batch(batch: BatchConfig) -> None:
    if batch.microbatch_size % batch.bn_span:
        raise ConfigError(
            f"batch.bn_span={batch.bn_span} does not divide batch.microbatch_size={batch.microbatch_size}: "
            f"{largest_divisor(batch.microbatch_size, batch.bn_span)} does"
        )
    accumulation_steps(batch, world_size=1)


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of number that is at most limit."""
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def accumulation_steps(batch: BatchConfig, *, world_size: int) -> int:
    """Microbatches per rank per update.

    Raises: ConfigError when the ranks do not divide the global batch into whole microbatches.
    """
    if batch.global_batch_size % (batch.microbatch_size * world_size):
        raise ConfigError(
            f"batch.global_batch_size={batch.global_batch_size} is not a multiple of "
            f"batch.microbatch_size={batch.microbatch_size} x {world_size} rank(s): "
            f"{_batch_remedy(batch, world_size=world_size)}"
        )
    return batch.global_batch_size // (batch.microbatch_size * world_size)


def _batch_remedy(batch: BatchConfig, *, world_size: int) -> str:
    """The change that fits: a smaller microbatch of whole ghost batches (same update), else another global batch."""
    ghosts_per_rank, rest = divmod(batch.global_batch_size, batch.bn_span * world_size)
    if rest == 0:
        ghosts = largest_divisor(ghosts_per_rank, batch.microbatch_size // batch.bn_span)
        return f"set batch.microbatch_size to {ghosts * batch.bn_span}"
    per_step = batch.microbatch_size * world_size
    return f"set batch.global_batch_size to {max(1, batch.global_batch_size // per_step) * per_step}"


def all_keys() -> tuple[str, ...]:
    """Every dotted key of a config, in order."""
    return tuple(
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(Config)
        for field in dataclasses.fields(section.type)  # type: ignore[arg-type]
    )
