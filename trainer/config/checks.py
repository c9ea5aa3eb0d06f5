"""Checks that the settings of run, data, augment, model, compute and comm fit: an error for each that does not."""

import math
from collections.abc import Iterator, Sequence

from bigbatch.errors import or_nearest
from bigbatch.trainer.config.batch import ranks_per_ghost
from bigbatch.trainer.config.dotted import class_of_root, is_import_path
from bigbatch.trainer.config.kinds import check_options
from bigbatch.trainer.config.optimizer import is_foreign
from bigbatch.trainer.config.sections import (
    LOADERS,
    MODELS,
    AugmentConfig,
    BatchConfig,
    CommConfig,
    ComputeConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
)
from bigbatch.trainer.config.strict_yaml import as_yaml

SMALLEST_SHARPENED = 3
"""Smallest side, in pixels, for sharpening by RandAugment and TrivialAugment."""

LARGEST_SIDE = 8192
"""Largest side of a model's input, in pixels: such an image takes 800 MB in fp32."""
SMALLEST_IMAGE = {"resnet9": 8, "alexnet_bn": 63}
"""Smallest side, in pixels, that reaches a model's last pooling; the ResNets take any."""
RESIDUAL_BLOCKS = {
    "resnet18": 8,
    "resnet34": 16,
    "resnet50": 16,
    "resnet101": 33,
    "resnet152": 50,
    "resnet9": 2,
    "alexnet_bn": 0,
}
LOGGERS = {
    "tensorboard": "bigbatch.trainer.loggers.tensorboard.TensorBoardRun",
    "wandb": "bigbatch.trainer.loggers.wandb.WandbRun",
    "mlflow": "bigbatch.trainer.loggers.mlflow.MlflowRun",
}
"""Loggers by name: classes of sessions, made with the run folder; a name with dots is a class of another package."""
METRICS = {"top1": 1, "top5": 1, "loss": -1}
"""Metric of an evaluation -> sign of an improvement."""


def check_loader_name(name: str) -> Iterator[str]:
    """Yield an error for a name that is neither one of LOADERS nor an import path. Imports nothing."""
    if name not in LOADERS and not is_import_path(name):
        yield (
            f"data.loader={name} must be one of {', '.join(map(repr, LOADERS))}, or an import path such as "
            f"mypackage.loaders.Mine{or_nearest(name.lower(), LOADERS)}"
        )


def check_root(root: str) -> Iterator[str]:
    """Yield an error if a data.root that names a class has no import path. Imports nothing."""
    if (own := class_of_root(root)) and not is_import_path(own[0]):
        yield f"data.root={root} must name the import path of a class, such as class:mypackage.data.Images"


def check_loader(data: DataConfig) -> Iterator[str]:
    if data.loader in LOADERS and (data.loader == "resident") != (data.crop == "padded"):
        yield (
            f"data.crop={data.crop} conflicts with data.loader={data.loader}: resident takes padded crops, the "
            "other loaders take resized ones"
        )
    if data.loader == "resident" and data.eval_crop_fraction != 1:
        yield (
            f"data.eval_crop_fraction={data.eval_crop_fraction} conflicts with data.loader=resident, which does "
            "not resize: set it to 1.0"
        )
    if data.loader == "resident" and data.train_sizes is not None:
        yield f"data.train_sizes={as_yaml(data.train_sizes)} has no meaning with data.loader=resident: set it to null"
    is_own = class_of_root(data.root) is not None
    is_remote = "://" in data.root and not is_own
    if data.cache_dir is not None and not is_remote:
        kind = "class" if is_own else "folder"
        yield f"data.cache_dir={data.cache_dir} has no meaning with data.root={data.root}, a {kind}: set it to null"
    if data.stage is not None and is_remote:
        yield f"data.stage={data.stage} conflicts with data.root={data.root}: set data.cache_dir instead"
    if data.shared_by is not None and (not data.keep_staged or (data.stage or data.cache_dir) is None):
        yield "data.shared_by needs data.stage or data.cache_dir, and conflicts with data.keep_staged=false"
    if data.stage is not None and is_own:
        yield f"data.stage={data.stage} conflicts with data.root={data.root}: only packed folders are copied"


def check_patience(data: DataConfig, comm: CommConfig) -> Iterator[str]:
    """Yield an error if other ranks wait less than twice the patience, a batch's longest delay (input/retry.py)."""
    patience, timeout = data.patience_seconds, comm.timeout_seconds
    if data.loader == "synthetic" or 2 * (patience + 1) <= timeout:
        return
    longest = math.floor(100 * (timeout / 2 - 1)) / 100
    shorter = f", or data.patience_seconds to at most {longest:g}" if longest > 0 else ""
    yield (
        f"data.patience_seconds={patience:g} is too long: the other ranks give up after comm.timeout_seconds="
        f"{timeout:g}: set that to at least {math.ceil(2 * (patience + 1))}{shorter}"
    )


def check_train_sizes(train_sizes: Sequence[tuple[int, int]], *, epochs: int) -> Iterator[str]:
    """Yield an error if data.train_sizes do not fit a run of that many epochs."""
    firsts, key = [first for first, _ in train_sizes], f"data.train_sizes={as_yaml(train_sizes)}"
    if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)):
        yield f"{key} must give epochs that rise from 0"
        return
    if firsts[-1] >= epochs:
        yield f"{key} changes at epoch {firsts[-1]}, but run.epochs={epochs}: the last epoch is {epochs - 1}"
    if not all(0 < size <= LARGEST_SIDE for _, size in train_sizes):
        yield f"{key} must give sizes of 1 to {LARGEST_SIDE} pixels"


def check_augment(augment: AugmentConfig, batch: BatchConfig) -> Iterator[str]:
    if (augment.randaugment_ops == 0) != (augment.randaugment_magnitude is None):
        remedy = "set it to a number from 0 to 30 (usually 9)" if augment.randaugment_ops else "set it to null"
        yield (
            f"augment.randaugment_magnitude={augment.randaugment_magnitude} conflicts with "
            f"augment.randaugment_ops={augment.randaugment_ops}: {remedy}"
        )
    for key, most in (("randaugment_ops", 64), ("randaugment_magnitude", 30)):
        if (value := getattr(augment, key) or 0) > most:
            yield f"augment.{key}={value} must be at most {most}"
    if augment.cutout_size % 2:
        yield f"augment.cutout_size={augment.cutout_size} is odd. Use an even number, such as {augment.cutout_size + 1}"
    if augment.mixup_alpha or augment.cutmix_alpha:
        yield from _check_mixing(augment, batch)


def _check_mixing(augment: AugmentConfig, batch: BatchConfig) -> Iterator[str]:
    if batch.bn_span < 2:
        yield (
            "augment.mixup_alpha and augment.cutmix_alpha mix images within a ghost batch, but batch.bn_span=1 has one "
            "image only. Set both to 0, or bn_span to at least 2"
        )
    if ranks_per_ghost(batch) > 1:
        yield (
            f"augment.mixup_alpha={augment.mixup_alpha} and augment.cutmix_alpha={augment.cutmix_alpha} mix within a "
            f"ghost batch, which batch.bn_span={batch.bn_span} spreads over ranks of "
            f"batch.microbatch_size={batch.microbatch_size}: set both to 0"
        )


def check_image_size(data: DataConfig, augment: AugmentConfig, *, model: str) -> Iterator[str]:
    """Yield an error for each image size that is too small for the model or an augmentation."""
    needs = [(SMALLEST_IMAGE.get(model, 1), f"model.name={model}")]
    if augment.randaugment_ops:
        needs.append((SMALLEST_SHARPENED, f"augment.randaugment_ops={augment.randaugment_ops}"))
    if augment.trivial_augment:
        needs.append((SMALLEST_SHARPENED, "augment.trivial_augment=true"))
    train_sizes = [("train_sizes", size) for _, size in data.train_sizes or () if size > 0]
    for key, size in [("image_size", data.image_size), *train_sizes]:
        if size > LARGEST_SIDE and key == "image_size":
            yield f"data.{key}={size} is too large: give at most {LARGEST_SIDE}"
        for smallest, what in needs:
            if size < smallest:
                yield f"data.{key}={size} is too small for {what}: give at least {smallest}"


def check_compute(compute: ComputeConfig, batch: BatchConfig, *, model: str) -> Iterator[str]:
    if compute.compile is None and compute.compile_fallback:
        yield "compute.compile_fallback=True has no meaning without compute.compile: set it to false"
    if compute.compile is not None and ranks_per_ghost(batch) > 1:
        yield (
            f"compute.compile={compute.compile} cannot exchange statistics between ranks, over which "
            f"batch.bn_span={batch.bn_span} with batch.microbatch_size={batch.microbatch_size} spreads a ghost batch: "
            f"set compute.compile to null, or batch.bn_span to at most {batch.microbatch_size}"
        )
    num_blocks = RESIDUAL_BLOCKS.get(model, 0)
    if compute.recomputed_blocks > num_blocks:
        has = f"{num_blocks} residual blocks: give at most {num_blocks}" if num_blocks else "none: set it to 0"
        yield f"compute.recomputed_blocks={compute.recomputed_blocks}, but model.name={model} has {has}"


def check_cuda_graph(optimizer: OptimizerConfig, comm: CommConfig) -> Iterator[str]:
    """Yield an error for each setting that compute.cuda_graph contradicts."""
    if is_foreign(optimizer.name):
        yield (
            f"compute.cuda_graph=True cannot capture optimizer.name={optimizer.name}: the host waits for it every "
            "step: set compute.cuda_graph to false"
        )
    if optimizer.name == "shampoo":
        yield (
            "compute.cuda_graph=True cannot capture optimizer.name=shampoo, which computes roots in some steps only: "
            "set it to false"
        )
    if comm.timeline_steps is not None:
        yield (
            f"comm.timeline_steps={list(comm.timeline_steps)} cannot record the steps of compute.cuda_graph=True: "
            "set comm.timeline_steps to null, or compute.cuda_graph to false"
        )
    if comm.buffers == "symmetric":
        yield (
            "comm.buffers=symmetric conflicts with compute.cuda_graph=True: replayed sums in NCCL's symmetric memory "
            "were wrong without an error (NVIDIA/nccl 1924): set comm.buffers to registered"
        )


def check_run(run: RunConfig, data: DataConfig) -> Iterator[str]:
    """Yield an error for each setting of evaluations, early stopping and loggers that contradicts another."""
    if run.eval_offset_epochs >= run.eval_every_epochs:
        yield (
            f"run.eval_offset_epochs={run.eval_offset_epochs} must be below run.eval_every_epochs="
            f"{run.eval_every_epochs}: give at most {run.eval_every_epochs - 1}"
        )
    if run.stop_metric is not None or run.stop_after_evaluations is not None:
        yield from _check_early_stop(run)
    if run.divergence_steps is not None and data.num_classes < 2:
        yield (
            f"run.divergence_steps={run.divergence_steps} has no meaning with data.num_classes={data.num_classes}: "
            "with one class every prediction is correct; set run.divergence_steps to null"
        )
    for name in sorted({name for name in run.loggers if run.loggers.count(name) > 1}):
        yield f"run.loggers={list(run.loggers)} names {name} twice: name it once"
    for name in run.loggers:
        if name not in LOGGERS and not is_import_path(name):
            yield (
                f"run.loggers: {name} is not one of {', '.join(LOGGERS)}{or_nearest(name.lower(), LOGGERS)}, nor an "
                "import path such as mypackage.loggers.Csv"
            )


def _check_early_stop(run: RunConfig) -> Iterator[str]:
    metric, evaluations = run.stop_metric, run.stop_after_evaluations
    if metric is not None and metric not in METRICS:
        yield f"run.stop_metric={metric} is not a metric of an evaluation: choose one of {', '.join(METRICS)}"
    if metric is not None and evaluations is None:
        yield f"run.stop_after_evaluations is null, but run.stop_metric={metric} needs it: give a number"
    if metric is None and evaluations is not None:
        yield f"run.stop_after_evaluations={evaluations} has no meaning without run.stop_metric: set it to null"
    elif evaluations is not None and evaluations >= _num_evaluations(run):
        yield (
            f"run.stop_after_evaluations={evaluations} would have no effect on a run of {_num_evaluations(run)} "
            f"evaluations: give less, or set it and run.stop_metric to null"
        )


def _num_evaluations(run: RunConfig) -> int:
    """Return the number of evaluations: after each epoch that is due, and after the last one."""
    due = range(1, run.epochs)
    # the last epoch is evaluated in any case: hence the 1
    return 1 + sum(epoch % run.eval_every_epochs == run.eval_offset_epochs for epoch in due)


def check_digests(run: RunConfig, compute: ComputeConfig) -> Iterator[str]:
    """Yield an error for layers and values that no digest would record."""
    for name, patterns in (("digest_layers", run.digest_layers), ("digest_values", run.digest_values)):
        if patterns is not None and not run.digest_every_steps:
            yield (
                f"run.{name}={list(patterns)} has no meaning with run.digest_every_steps=0: give the steps between two "
                "records, such as 1"
            )
    if run.digest_layers is None:
        return
    layers = f"run.digest_layers={list(run.digest_layers)}"
    for key, value, remedy in (
        ("compute.compile", compute.compile, "null"),
        ("compute.cuda_graph", compute.cuda_graph or None, "false"),
    ):
        if value is not None:
            yield f"{layers} cannot look into a forward of {key}={value}: set {key} to {remedy}, or the layers to null"


def check_audits(run: RunConfig, compute: ComputeConfig) -> Iterator[str]:
    """Yield an error for each setting by which ranks would not compute the same bits of a microbatch, or go back."""
    key = f"run.audit_every_steps={run.audit_every_steps}"
    if not run.reproducible:
        yield f"{key} compares bits, which needs deterministic kernels: set run.reproducible to true"
    if compute.cuda_graph:
        yield f"{key} cannot read gradients of replayed steps: set compute.cuda_graph to false"
    if not run.compare_every_steps:
        yield f"{key} goes back to a checkpoint on which ranks agreed: set run.compare_every_steps to 100, its default"


def check_noise_scale(run: RunConfig, batch: BatchConfig, compute: ComputeConfig) -> Iterator[str]:
    """Yield an error if the run has no gradients of two batch sizes, or hides them in a CUDA graph."""
    key = f"run.noise_scale_every_steps={run.noise_scale_every_steps}"
    if batch.bn_span > batch.microbatch_size:
        yield (
            f"{key} needs microbatches of whole ghost batches, as their parts are not independent: set batch.bn_span "
            f"to {batch.microbatch_size}, or batch.microbatch_size to {batch.bn_span}"
        )
    elif batch.global_batch_size < 2 * batch.microbatch_size:
        half = batch.microbatch_size // 2
        yield (
            f"{key} compares microbatches with the global batch, and batch.global_batch_size="
            f"{batch.global_batch_size} is one microbatch: set batch.microbatch_size (and a batch.bn_span above it) to "
            f"{half} or less"
            if half
            else f"{key} compares microbatches with the global batch, which is one image: raise batch.global_batch_size"
        )
    if compute.cuda_graph:
        yield (
            f"{key} cannot read gradients of replayed steps: set compute.cuda_graph to false, or "
            "run.noise_scale_every_steps to 0"
        )


def check_reproducible(batch: BatchConfig, compute: ComputeConfig, comm: CommConfig) -> Iterator[str]:
    """Yield an error for each setting that gives other bits on another number of ranks."""
    if ranks_per_ghost(batch) > 1:
        yield (
            f"run.reproducible=True needs each ghost batch on one rank: set batch.bn_span={batch.bn_span} to at most "
            f"batch.microbatch_size={batch.microbatch_size}"
        )
    refused = (
        ("compute.compile", compute.compile, "null", "chooses kernels by the machine"),
        ("comm.wire_dtype", comm.wire_dtype, "null", "rounds gradients, and sums of integers must not be rounded"),
    )
    for key, value, remedy, why in refused:
        if value is not None:
            yield f"run.reproducible=True cannot keep {key}={value}, which {why}: set it to {remedy}"


def check_comm(comm: CommConfig) -> Iterator[str]:
    if comm.table is None:
        for key, value in (("threshold_bytes", comm.threshold_bytes), ("buffer_bytes", comm.buffer_bytes)):
            if value is None:
                yield f"comm.{key}=null takes its value from comm.table, also null: set comm.{key} or comm.table"
        if comm.algorithm == "hybrid":
            yield "comm.algorithm=hybrid needs comm.table, which is null: make one with bigbatch comm tune"
    if comm.wire_dtype is None and comm.predivide != 1:
        yield (
            f"comm.predivide={comm.predivide} has no meaning without comm.wire_dtype: set it to 1.0, or wire_dtype "
            "to float16"
        )
    if comm.warn_seconds > comm.timeout_seconds:
        yield (
            f"comm.warn_seconds={comm.warn_seconds:g} is longer than comm.timeout_seconds={comm.timeout_seconds:g}, "
            f"after which the job has ended: set it to {comm.timeout_seconds / 4:g}"
        )
    if comm.timeline_steps and comm.timeline_steps[0] > comm.timeline_steps[1]:
        yield f"comm.timeline_steps={list(comm.timeline_steps)} must be the first and the last step, in this order"


LIBRARIES = ("torchvision:", "timm:")
"""Prefixes of the names of models and weights in torchvision and timm."""
STATED_ELSEWHERE = {
    "num_classes": "data.num_classes",
    "weights": "model.weights",
    "pretrained": "model.weights",
    "checkpoint_path": "model.weights",
}
"""Arguments of a model -> the keys of the config that give them."""


def is_foreign_model(name: str) -> bool:
    """Return whether the model comes from torchvision, timm or, by its import path, from another package."""
    return "." in name or ":" in name


def check_model_name(name: str) -> Iterator[str]:
    """Yield an error for a name of unknown form. Imports nothing: the login node may lack the package."""
    if not is_foreign_model(name):
        if name not in MODELS:
            yield (
                f"model.name={name} is not one of {', '.join(MODELS)}{or_nearest(name.lower(), MODELS)}. "
                "Others have names such as timm:resnet18, torchvision:resnet18 and mypackage.models.Net"
            )
        return
    _, colon, of_library = name.partition(":")
    if not (of_library and name.startswith(LIBRARIES) if colon else is_import_path(name)):
        yield (
            f"model.name={name} is not a legal name: use a form such as timm:resnet18, torchvision:resnet18 or "
            "mypackage.models.Net"
        )


def check_model(model: ModelConfig) -> Iterator[str]:
    if not is_foreign_model(model.name):
        yield from check_options("model", model.name, model.options)
    for argument, key in STATED_ELSEWHERE.items():
        if is_foreign_model(model.name) and argument in (model.options or {}):
            yield f"model.options must not state {argument}: set {key} instead"
    if model.new_head and model.weights is None:
        yield "model.new_head=True has no meaning without model.weights, as all weights are new: set it to false"
    if model.partial_weights is not None:
        yield from _check_partial_weights(model)
    starts_all = model.weights is not None and model.partial_weights is None and not model.new_head
    for key, value in (("init", model.init), ("linear_std", model.linear_std)):
        if value is not None and starts_all:
            yield f"model.{key}={value} has no meaning with model.weights, which start every layer: set it to null"


def _check_partial_weights(model: ModelConfig) -> Iterator[str]:
    if model.weights is None:
        yield "model.partial_weights needs model.weights, which is null: set both or neither"
    if model.new_head:
        yield (
            "model.new_head=True has no meaning with model.partial_weights, which takes the last layer only if a "
            "pattern matches it: set it to false"
        )
    if not model.partial_weights:
        yield "model.partial_weights=[] names no weights: give a pattern, or set it and model.weights to null"
