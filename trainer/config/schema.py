"""What an experiment is, and which settings go together."""

import dataclasses
import math
from dataclasses import dataclass

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.batch import check_batch, ranks_per_ghost
from bigbatch.trainer.config.compute import check_compute, check_cuda_graph
from bigbatch.trainer.config.optimizer import check_optimizer, check_sharded
from bigbatch.trainer.config.precision import SCALED, check_average, check_precision
from bigbatch.trainer.config.schedule import check_evaluations, check_schedule
from bigbatch.trainer.config.sections import (
    AugmentConfig,
    BatchConfig,
    CommConfig,
    ComputeConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
)
from bigbatch.trainer.config.stopping import check_stopping


@dataclass(frozen=True, kw_only=True)
class Config:
    """One experiment, complete. Raises: ConfigError naming the key, the value and a legal one."""

    run: RunConfig
    data: DataConfig
    augment: AugmentConfig
    model: ModelConfig
    batch: BatchConfig
    compute: ComputeConfig
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    comm: CommConfig

    def __post_init__(self) -> None:
        _check_ranges(self)
        check_batch(self.batch)
        check_compute(self.compute, self.batch, model=self.model.name)
        if self.compute.cuda_graph:
            check_cuda_graph(self.optimizer, self.comm)
        check_optimizer(self.optimizer)
        check_sharded(self.optimizer, self.comm)
        _check_choices(self)
        _check_loader(self.data)
        _check_train_sizes(self.data, epochs=self.run.epochs)
        _check_image_size(self)
        _check_augment(self)
        _check_patience(self)
        check_evaluations(self.run)
        check_schedule(self.schedule, epochs=self.run.epochs)
        _check_comm(self.comm)
        check_precision(self.optimizer)
        check_average(self.optimizer)
        check_stopping(self.run, self.data)


POSITIVE = (
    "run.epochs",
    "run.log_every_steps",
    "run.eval_every_epochs",
    "run.keep_checkpoints",
    "run.stop_after_evaluations",
    "run.divergence_steps",
    "data.num_classes",
    "data.num_synthetic_samples",
    "data.image_size",
    "data.std",
    "data.num_threads",
    "data.prefetch_batches",
    "data.patience_seconds",
    "model.width",
    "model.celu_alpha",
    "model.norm_scale",
    "model.logit_scale",
    "model.whitening_eps",
    "batch.global_batch_size",
    "batch.microbatch_size",
    "batch.bn_span",
    "batch.virtual_ranks",
    "optimizer.bias_lr_factor",
    "optimizer.trust_coefficient",
    "optimizer.clip_norm",
    "optimizer.ema_every_steps",
    "optimizer.loss_scale",
    "optimizer.loss_scale_growth_steps",
    "schedule.base_lr",
    "schedule.decay_epochs",
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
    "run.eval_offset_epochs",
    "data.max_skipped",
    "data.probe_seconds",
    "augment.color_jitter",
    "augment.randaugment_ops",
    "augment.randaugment_magnitude",
    "augment.cutout_size",
    "augment.mixup_alpha",
    "augment.cutmix_alpha",
    "compute.recomputed_blocks",
    "optimizer.weight_decay",
    "optimizer.eps",
    "schedule.warmup_epochs",
    "schedule.end_lr",
    "schedule.milestone_epochs",
    "comm.timeline_steps",
)
SHARE = ("data.hardware_share", "data.mean")
SHARE_WITH_ONE = ("run.target_top1", "data.crop_area_min", "data.eval_crop_fraction")
SHARE_BELOW_ONE = ("optimizer.momentum", "optimizer.betas", "optimizer.ema_decay", "optimizer.label_smoothing")

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")

ONLY_FOR = {
    # key: (the key that decides, its values for which this key must be given)
    "data.num_synthetic_samples": ("data.loader", ("synthetic",)),
    "data.crop_area_min": ("data.crop", ("resized",)),
    "model.width": ("model.name", ("resnet9",)),
    "model.pool_first": ("model.name", ("resnet9",)),
    "model.logit_scale": ("model.name", ("resnet9",)),
    "model.zero_gamma": ("model.name", RESNETS),
    "model.blurpool": ("model.name", RESNETS),
    "optimizer.momentum": ("optimizer.name", ("lars", "sgd")),
    "optimizer.nesterov": ("optimizer.name", ("lars", "sgd")),
    "optimizer.betas": ("optimizer.name", ("lamb", "adamw")),
    "optimizer.trust_coefficient": ("optimizer.name", ("lars",)),
    "optimizer.eps": ("optimizer.name", ("lars", "lamb", "adamw")),
    "optimizer.loss_scale": ("optimizer.precision", SCALED),
    "optimizer.momentum_form": ("optimizer.name", ("lars",)),
    "schedule.end_lr": ("schedule.name", ("polynomial", "cosine", "one_cycle")),
    "schedule.power": ("schedule.name", ("polynomial",)),
    "schedule.milestone_epochs": ("schedule.name", ("step",)),
    "schedule.gamma": ("schedule.name", ("step",)),
}

ALLOWED_FOR = {
    # key: (the key that decides, its values for which this key may be given)
    "model.celu_alpha": ("model.name", ("resnet9",)),
    "model.norm_scale": ("model.name", ("resnet9",)),
    "model.whitening_eps": ("model.name", ("resnet9",)),
}

SMALLEST_SHARPENED = 3
"""Pixels a side that one of RandAugment's operations needs."""

NO_READER = ("resident", "synthetic")
"""Loaders that do not read pictures while training."""

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
        (SHARE, "at least 0 and at most 1", lambda v: 0 <= v <= 1),
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
    for key, (decider, values) in (ONLY_FOR | ALLOWED_FOR).items():
        value, choice = lookup(config, key), lookup(config, decider)
        if choice in values and value is None and key in ONLY_FOR:
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
    for key, value, loaders in (
        ("train_sizes", _plain(data.train_sizes), ("resident",)),
        ("max_skipped", data.max_skipped, NO_READER),
        ("stage", data.stage, NO_READER),
    ):
        if data.loader in loaders and value is not None:
            raise ConfigError(f"data.{key}={value} has no meaning with data.loader={data.loader}: set it to null")
    if data.stage == "":
        raise ConfigError("data.stage is empty: name a folder of each node, or set it to null")


def _check_patience(config: Config) -> None:
    """Reading may hold a microbatch up for twice the patience (data/patience.py); meanwhile the other ranks wait."""
    patience, timeout = config.data.patience_seconds, config.comm.timeout_seconds
    if config.data.loader == "synthetic" or 2 * (patience + 1) <= timeout:
        return
    longest = math.floor(100 * (timeout / 2 - 1)) / 100
    shorter = f", or data.patience_seconds to at most {longest:g}" if longest > 0 else ""
    raise ConfigError(
        f"data.patience_seconds={patience:g} is too long: the other ranks give up after comm.timeout_seconds="
        f"{timeout:g}: set that to at least {math.ceil(2 * (patience + 1))}{shorter}"
    )


def _check_train_sizes(data: DataConfig, *, epochs: int) -> None:
    if data.train_sizes is None:
        return
    firsts = [first for first, _ in data.train_sizes]
    if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)):
        raise ConfigError(f"data.train_sizes={_plain(data.train_sizes)} must give epochs that rise from 0")
    if firsts[-1] >= epochs:
        raise ConfigError(
            f"data.train_sizes={_plain(data.train_sizes)} changes at epoch {firsts[-1]}, but run.epochs={epochs}: the "
            f"last epoch is {epochs - 1}"
        )
    if min(size for _, size in data.train_sizes) <= 0:
        raise ConfigError(f"data.train_sizes={_plain(data.train_sizes)} must give sizes of 1 pixel or more")


def _plain(pairs: tuple[tuple[int, int], ...] | None) -> list[list[int]] | None:
    return None if pairs is None else [list(pair) for pair in pairs]


def _check_augment(config: Config) -> None:
    augment = config.augment
    if (augment.randaugment_ops == 0) != (augment.randaugment_magnitude is None):
        remedy = "give one, 9 is usual" if augment.randaugment_ops else "set it to null"
        raise ConfigError(
            f"augment.randaugment_magnitude={augment.randaugment_magnitude} does not go with "
            f"augment.randaugment_ops={augment.randaugment_ops}: {remedy}"
        )
    if (augment.randaugment_magnitude or 0) > 30:
        raise ConfigError(f"augment.randaugment_magnitude={augment.randaugment_magnitude} must be at most 30")
    if augment.cutout_size % 2:
        raise ConfigError(f"augment.cutout_size={augment.cutout_size} must be even: {augment.cutout_size + 1} is")
    if (augment.mixup_alpha or augment.cutmix_alpha) and config.batch.bn_span < 2:
        raise ConfigError(
            "augment.mixup_alpha and augment.cutmix_alpha mix within a ghost batch: batch.bn_span=1 leaves none"
        )
    if (augment.mixup_alpha or augment.cutmix_alpha) and ranks_per_ghost(config.batch) > 1:
        raise ConfigError(
            f"augment.mixup_alpha={augment.mixup_alpha} and augment.cutmix_alpha={augment.cutmix_alpha} mix within a "
            f"ghost batch, whose pictures batch.bn_span={config.batch.bn_span} spreads over ranks of "
            f"batch.microbatch_size={config.batch.microbatch_size}: set both to 0"
        )


def _check_image_size(config: Config) -> None:
    needs = [(SMALLEST_IMAGE.get(config.model.name, 1), f"model.name={config.model.name}")]
    if config.augment.randaugment_ops:
        needs.append((SMALLEST_SHARPENED, f"augment.randaugment_ops={config.augment.randaugment_ops}"))
    train_sizes = [("train_sizes", size) for _, size in config.data.train_sizes or ()]
    for key, size in [("image_size", config.data.image_size), *train_sizes]:
        for smallest, who in needs:
            if size < smallest:
                raise ConfigError(f"data.{key}={size} is too small for {who}: give at least {smallest}")


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


def all_keys() -> tuple[str, ...]:
    """Every dotted key of a config, in order."""
    return tuple(
        f"{section.name}.{field.name}"
        for section in dataclasses.fields(Config)
        for field in dataclasses.fields(section.type)  # type: ignore[arg-type]
    )
