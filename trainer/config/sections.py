"""The sections of an experiment. Each key is one field: its type, legal numbers and choices, default and help."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from bigbatch.comm.gradients.fusion import DEFAULT_SIZES
from bigbatch.trainer.config.fields import (
    ABOVE_ZERO,
    BELOW_2_63,
    BELOW_ONE,
    COUNT,
    DECAY,
    MEGAPIXELS,
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    SHARE,
    UP_TO_4096,
    OnlyFor,
)

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
MODELS = (*RESNETS, "alexnet_bn", "resnet9")
IMAGENET_COUNTS = {"train": 1_281_167, "val": 50_000}  # images of each split
READERS = ("dali", "torchvision")  # loaders that read images while training
LOADERS = (*READERS, "resident", "synthetic")
OF_IMAGES = OnlyFor("loader", LOADERS[:-1], or_null=True, or_own=True)
OPTIMIZERS = ("lars", "lamb", "sgd", "adamw", "lion", "muon", "shampoo")
SCALED = ("fp16", "fp16_autocast")  # precisions with a loss scale
ModeKey = Literal["batch.microbatch_size", "compute.compile", "compute.cuda_graph"]
MODE_KEYS: tuple[str, ...] = get_args(ModeKey)  # chosen by compute.mode=auto, unless the user states them
RANGE_TEST = "schedule.range_test"
READING_KEYS = (  # where and how images are read, not which
    *("data.num_threads", "data.prefetch_batches", "data.patience_seconds", "data.bind_numa", "data.probe_seconds"),
    *("data.stage", "data.keep_staged", "data.cache_dir", "data.cache_gb", "data.shared_by"),
)
RECORDING_KEYS = (  # what a run records, saves and waits for: not what it learns, nor how fast
    *("run.directory", "run.resume", "run.loggers", "run.log_every_steps", "run.checkpoint_every_steps", "run.heal"),
    *("run.keep_checkpoints", "run.checkpoint_timeout_seconds", "data.patience_seconds", "data.probe_seconds"),
    *("comm.warn_seconds", "comm.timeout_seconds", "comm.meeting_seconds", "comm.timeline_steps", "run.operator_files"),
)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Folder, length, checkpoints, checks and loggers of the run."""

    directory: Annotated[str, PATH] = "runs/{name}"
    """Folder for config, metrics, checkpoints, plot and summary; {name} stands for the name of the config file."""
    seed: Annotated[int, BELOW_2_63] = 0
    """Seed of initial weights, sample order and random augmentation."""
    epochs: Annotated[int, COUNT] = 90
    """Passes over the training set."""
    log_every_steps: Annotated[int, COUNT] = 20
    """Steps between two reports; each sums over all ranks and costs one host sync."""
    eval_every_epochs: Annotated[int, COUNT] = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    eval_offset_epochs: Annotated[int, NOT_NEGATIVE] = 0
    """Epoch of the first evaluation, less than eval_every_epochs; 0: the first comes after eval_every_epochs."""
    checkpoint_every_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between two checkpoints. Each evaluation writes one too; 0: no others."""
    keep_checkpoints: Annotated[int, COUNT] = 2
    """How many of the newest checkpoints to keep, in addition to the best."""
    heal: Literal["in_place", "restart"] = "restart"
    """After a rank is lost. restart: all processes end, and the launcher may start them again. in_place: the remaining
    ranks continue in the same processes from the same step, if the global batch can be divided among them. Not
    supported with MPI and Horovod."""
    compare_every_steps: Annotated[int, NOT_NEGATIVE] = 100
    """Steps, rounded up to the next report, between two comparisons of all ranks' weights and optimizer state; 0 for
    none. The start and each checkpoint compare them too. If they differ, the run goes back to the newest checkpoint on
    which they agreed."""
    audit_every_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between two audits, in which each rank computes a microbatch of another one again and compares the
    gradients before their sum; each step that a checkpoint follows is audited, too; 0 for none. A third rank decides
    which device is wrong, and the run goes back to its newest checkpoint. Needs reproducible."""
    reproducible: bool = False
    """Final weights are bit-identical for any number of ranks and nodes, any algorithm, backend and fusion plan, and
    after any resume, if batch.microbatch_size, the kind of device and the versions stay. Gradients are summed as
    integers, with deterministic kernels. Sums take twice the bytes; CPUs use compute.cpu_threads."""
    digest_every_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between two records of digests (images, gradients before and after their sum, weights, optimizer state).
    bigbatch diff reads them to find the first difference of two runs; 0 for none."""
    digest_layers: tuple[str, ...] | None = None
    """Also record digests of the activations of these layers: patterns of names, such as [layer1.*, fc]; null: none."""
    digest_values: tuple[str, ...] | None = None
    """Gradients and activations to keep whole in the run folder at these steps, so that bigbatch diff names the
    elements that differ: patterns of the names of parameters and of digest_layers; null for none."""
    noise_scale_every_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between two measurements of the gradient noise scale: the global batch above which more images per step
    save few steps; 0 for none. Needs two microbatches of whole ghost batches in a global batch."""
    checkpoint_timeout_seconds: Annotated[float, COUNT] = 600.0
    """The job ends if a checkpoint or the final plot takes longer to write; comm.timeout_seconds does not count."""
    resume: Annotated[str, PATH] = "auto"
    """auto: resume from the newest checkpoint of the run folder, if there is one; never: refuse a used run folder;
    otherwise the path of a checkpoint to start from."""
    metrics: dict[str, Any] | None = None
    """Your own metrics: name and import path of a class or function that returns numbers for each image, such as
    {balanced: mypackage.metrics.Balanced}, or {name, options} if it takes arguments; null for none."""
    operator_files: bool = False
    """Also write metrics.prom (for Prometheus) and events.jsonl (start, lost, healed, saved, ended) in the folder."""
    loggers: tuple[str, ...] = ("tensorboard",)
    """Loggers that also receive the numbers of metrics.jsonl: tensorboard, wandb (Weights & Biases), mlflow, or import
    paths such as mypackage.loggers.Csv. If one fails, the run warns once and continues. [] for none."""
    target_top1: Annotated[float | None, ABOVE_ZERO] = None
    """End the run at the evaluation that reaches this top-1, in (0, 1]; null to run all epochs."""
    stop_metric: str | None = None
    """Metric for early stopping: top1, top5 or loss of the evaluation; null for no early stopping."""
    stop_after_evaluations: Annotated[int | None, COUNT] = None
    """End the run after this many evaluations without a better stop_metric; null without stop_metric."""
    divergence_steps: Annotated[int | None, COUNT] = None
    """End the run if the training loss is no better than a guess (ln of the number of classes) for this many steps
    after the warm-up; null: end it only if the loss is not finite. A run with fewer steps is not checked."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Images, and how they are read, cropped and normalized."""

    loader: str = "dali"
    """dali: decode and resize ahead, on the GPU if there is one; torchvision: the same in Pillow threads; resident:
    whole set decoded once and kept on the device; synthetic: generated tensors; or a class by its import path."""
    resident_on: Annotated[Literal["device", "host"] | None, OnlyFor("loader", ("resident",))] = "device"
    """Memory in which resident keeps the set; host: crop there and copy each batch. null for other loaders."""
    root: Annotated[str, PATH] = "data/imagenet"
    """Folder with train/<class>/<image> and val/<class>/<image>, with packed or WebDataset's shards, such a folder at
    s3://, gs:// or https://, a list that bigbatch init wrote, or class:mypackage.data.Images. Not for synthetic."""
    list: Annotated[str | None, PATH, OF_IMAGES] = None
    """List of splits and classes that bigbatch init wrote, for images below root; null: root has its own."""
    num_classes: Annotated[int, COUNT] = 1000
    """Classes of the data set and outputs of the model."""
    num_synthetic_samples: Annotated[int | None, COUNT, OnlyFor("loader", ("synthetic",), or_null=True)] = None
    """Images in the generated training set and in the validation set. null: as many as ImageNet has."""
    image_size: Annotated[int, COUNT] = 224
    """Height and width of the model's input, in pixels; for training images only if train_sizes is null."""
    train_sizes: tuple[tuple[int, int], ...] | None = None
    """Progressive resizing: pairs of an epoch and the image size from that epoch on; null for image_size."""
    crop: Literal["resized", "padded"] = "resized"
    """Training crop. resized: random area and aspect ratio (ImageNet); padded: shift by up to 4 pixels (CIFAR)."""
    crop_area_min: Annotated[float | None, ABOVE_ZERO, OnlyFor("crop", ("resized",))] = 0.08
    """Smallest fraction of the image's area in a resized crop, in (0, 1]; null for padded."""
    balance: Annotated[float, SHARE, OF_IMAGES] = 0.0
    """0: each image once in an epoch; 1: each class equally often; between: as often as images ** (1 - balance)."""
    flip: bool = True
    """Mirror half of the training images."""
    eval_crop_fraction: Annotated[float, ABOVE_ZERO] = 0.875
    """Side of the central evaluation crop as a fraction of the image's shorter side, in (0, 1]."""
    eval_flip: bool = False
    """Evaluate each image and its mirror image, and add the two outputs (test-time flip)."""
    mean: Annotated[tuple[float, float, float], SHARE] = (0.485, 0.456, 0.406)
    """Channel means (red, green, blue) on the scale 0 to 1; default: torchvision's for ImageNet."""
    std: Annotated[tuple[float, float, float], POSITIVE] = (0.229, 0.224, 0.225)
    """Channel standard deviations (red, green, blue) on the scale 0 to 1; default: torchvision's for ImageNet."""
    exif_orientation: Annotated[bool, OF_IMAGES] = False
    """Turn images as their EXIF data say, in training and afterwards; false: as stored, as ImageNet's recipes do."""
    background: Annotated[Literal["white", "black", "gray"] | None, OF_IMAGES] = None
    """Colour behind transparent pixels; null: transparency is ignored, and the colour under it shows."""
    max_skipped: Annotated[int | None, NOT_NEGATIVE, OnlyFor("loader", READERS, or_null=True, or_own=True)] = None
    """Most bad images (damaged, or above max_megapixels) to replace; the summary lists them. null: none."""
    max_megapixels: Annotated[float, MEGAPIXELS] = 50.0
    """Images with more million pixels, by their header, are bad: a megapixel takes 4 MB per decoding thread."""
    num_threads: Annotated[int, UP_TO_4096] = 4
    """Decoding threads per rank."""
    prefetch_batches: Annotated[int, UP_TO_4096] = 2
    """Microbatches prepared ahead of use."""
    patience_seconds: Annotated[float, COUNT] = 20.0
    """How long to retry an image that cannot be read; then the run saves a checkpoint and ends."""
    stage: Annotated[str | None, PATH, OnlyFor("loader", READERS, or_null=True, or_own=True)] = None
    """Folder on each node, on a disk or in /dev/shm, to which packed data are copied first; null to read from root."""
    keep_staged: bool = True
    """Leave the copy in stage for the next run; false: the last run on a node that uses it removes it at its end."""
    cache_dir: Annotated[str | None, PATH, OnlyFor("loader", READERS, or_null=True, or_own=True)] = None
    """Folder on a disk of each node that keeps what was read from a root such as s3://bucket; null: keep nothing."""
    cache_gb: Annotated[float, POSITIVE] = 200.0
    """Most GB (1e9 bytes) to keep in cache_dir for this root, a tenth for validation; the rest is read again."""
    shared_by: tuple[str, ...] | None = None
    """Share stage and cache_dir with all users of a node, and use what these hold there: [root]; null: your own."""
    bind_numa: bool = True
    """On nodes with several NUMA domains, bind each rank to the cores near its GPU, or else near its memory."""
    probe_seconds: Annotated[float, NOT_NEGATIVE] = 1.0
    """How long to measure the input rate without training, before the first step; 0 for no measurement."""


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Augmentations of training images on the model's device, after crop and flip, in this order; 0 for none."""

    color_jitter: Annotated[float, NOT_NEGATIVE] = 0.0
    """Change brightness, contrast and saturation by up to this fraction, in random order."""
    randaugment_ops: Annotated[int, NOT_NEGATIVE] = 0
    """Random operations on each image (RandAugment)."""
    randaugment_magnitude: Annotated[int | None, NOT_NEGATIVE] = None
    """Strength of these operations, 0 to 30; null without operations."""
    trivial_augment: bool = False
    """One random operation of any strength on each image (TrivialAugment, wide)."""
    cutout_size: Annotated[int, NOT_NEGATIVE] = 0
    """Side of the square that is erased, in pixels."""
    erasing_probability: Annotated[float, SHARE] = 0.0
    """Share of images in which a random rectangle is erased (random erasing)."""
    mixup_alpha: Annotated[float, NOT_NEGATIVE] = 0.0
    """Blend each image and its label with another of its ghost batch, by a weight from Beta(alpha, alpha)."""
    cutmix_alpha: Annotated[float, NOT_NEGATIVE] = 0.0
    """Paste a box from another image of the ghost batch. With mixup too, each ghost batch gets one of the two."""
    custom: dict[str, Any] | None = None
    """Your own, before mixup: {blur: mypackage.Blur}, or {blur: {name, options}} if it takes arguments; null: none."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The classifier and its initial weights."""

    name: str = "resnet50"
    """resnet18, resnet34, resnet50, resnet101, resnet152 (v1.5), alexnet_bn, resnet9 (David Page's), torchvision:NAME,
    timm:NAME, or the import path of a torch.nn.Module, such as mypackage.models.Net."""
    options: dict[str, Any] | None = None
    """Settings of resnet9 and the ResNets, or arguments of a model from another package, such as {width: 32}, or one at
    a time: --model.options.width 32. null for none."""
    init: Literal["fan_in", "fan_out", "xavier"] | None = None
    """Initialization of convolutions and linear layers: normal, standard deviation sqrt(2 / fan_in), sqrt(2 / fan_out)
    or sqrt(2 / (fan_in + fan_out)), biases 0; null for the model's default."""
    linear_std: Annotated[float | None, POSITIVE] = None
    """Standard deviation of normal initial weights of linear layers, such as 0.01; null: init decides."""
    weights: Annotated[str | None, PATH] = None
    """Weights to start from: a checkpoint folder, a file with a state_dict of bigbatch, torchvision or timm, or
    torchvision:NAME or timm:NAME for weights that these have downloaded; null: random, from run.seed. A resumed run
    takes those of its checkpoint."""
    new_head: bool = False
    """Start the last layer from random weights instead of those in model.weights, which may have other classes."""
    partial_weights: tuple[str, ...] | None = None
    """Patterns of the names of weights to take from model.weights, such as [conv1.*, layer1.0.*]; its network may be
    shallower. Other weights start as without model.weights. null to take all."""
    frozen: tuple[str, ...] | None = None
    """Patterns of the names of weights that are not trained, such as layer1.*. Batch norms compute as in evaluation if
    a pattern matches their running statistics. null to train all."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """Sizes of the global batch and its parts; any number of ranks gives the same update."""

    global_batch_size: Annotated[int, COUNT] = 256
    """Samples per update, over all ranks and accumulation steps."""
    microbatch_size: Annotated[int, COUNT] = 32
    """Samples per rank per forward pass; the accumulation steps are derived from it."""
    bn_span: Annotated[int, COUNT] = 32
    """Samples over which batch norm computes its statistics (a ghost batch): a divisor of microbatch_size, or a
    multiple of it, which spans neighbouring ranks."""
    virtual_ranks: Annotated[int | None, COUNT] = None
    """Replay the updates of a job of this many ranks on this job's ranks by accumulation; null for no replay."""


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """How forward and backward are computed: these keys change speed and memory, not what is learned."""

    mode: Annotated[Literal["auto", "eager"] | int, COUNT] = "auto"
    """auto: on GPUs, a rule sets microbatch_size, compile and cuda_graph from model, precision, memory, and images per
    GPU and step; the update stays the same up to rounding. A number: as auto, as if a GPU had no more images; a sweep
    states it. eager: these keys as stated. On a CPU, and with run.reproducible, all are eager."""
    mode_keeps: tuple[ModeKey, ...] = ()
    """Keys that mode=auto must not change. Default: those of the three keys that you set on the command line or in your
    own config. Values from packaged recipes may be changed."""
    compile: Literal["default", "max-autotune"] | None = None
    """torch.compile mode of the model's forward; max-autotune also tries several kernels for each operation, which
    takes minutes longer. null for no compilation."""
    compile_fallback: bool = False
    """If this machine cannot compile, warn and run without; false: end the run. Must be false without compile."""
    cuda_graph: bool = False
    """Capture the whole step with its sums over ranks, and replay it by one launch per microbatch: for small local
    batches, where launches take longer than the work. Needs a GPU, and NCCL for several ranks."""
    channels_last: bool = True
    """Keep images and weights in NHWC memory, which tensor cores and oneDNN read without a conversion."""
    cudnn_benchmark: bool = True
    """Let cuDNN try its algorithms on each new shape and keep the fastest; no effect on a CPU."""
    cpu_threads: Annotated[int | None, UP_TO_4096] = None
    """CPU threads per rank for computation; they determine how sums are rounded. null: the rank's share of the
    machine's cores, or 1 with run.reproducible."""
    recomputed_blocks: Annotated[int, NOT_NEGATIVE] = 0
    """Activation checkpointing: number of residual blocks, counted from the input, that backward recomputes."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Optimizer, loss, precision and weight averaging."""

    name: str = "lars"
    """lars, lamb, sgd, adamw, lion, muon, shampoo, or a class by its import path, such as
    schedulefree.SGDScheduleFree."""
    momentum: Annotated[float | None, BELOW_ONE, OnlyFor("name", ("lars", "sgd", "muon", "shampoo"))] = 0.9
    """Fraction of the last update that is kept, in [0, 1); only for lars, sgd, muon and shampoo, else null."""
    weight_decay: Annotated[float, DECAY] = 1e-4
    """Weight decay: L2 in lars, sgd and shampoo, decoupled in lamb, adamw, lion and muon (for its matrices)."""
    exclude_bias_and_norm: bool = True
    """No weight decay and no trust ratio for biases and batch norm (Jia et al. 2018: worth 1.3% top-1)."""
    bias_lr_factor: Annotated[float, POSITIVE] = 1.0
    """Multiplies the learning rate of biases, those of batch norm included, and divides their weight decay."""
    lr_factors: dict[str, Any] | None = None
    """Factors on the schedule's learning rate by patterns of weights' names, such as {"fc.*": 1, "*": 0.1}. The first
    pattern that matches counts; without a match the factor is 1. null for no such factors."""
    options: dict[str, Any] | None = None
    """Settings of that optimizer, or arguments of a class from another package, such as {trust_coefficient: 0.002}, or
    one at a time: --optimizer.options.trust_coefficient 0.002. null for none."""
    sharded: bool = False
    """Each rank updates a part of the weights and keeps its optimizer state only; comm.algorithm has no effect."""
    clip_norm: Annotated[float | None, POSITIVE] = None
    """Clip the global L2 norm of all gradients to this value; null for no clipping."""
    ema_decay: Annotated[float | None, BELOW_ONE] = None
    """Decay of the moving average of the weights, in [0, 1), which evaluation uses. null for no average."""
    ema_warmup: bool = True
    """Bound the decay by (1 + n) / (10 + n) at the average's n-th update. False: always ema_decay, as in timm."""
    ema_every_steps: Annotated[int | None, COUNT] = None
    """Training steps between two updates of the average; null without an average."""
    loss: str = "cross_entropy"
    """cross_entropy, or the import path of your own loss, which returns a number for each image, such as
    mypackage.losses.Focal."""
    loss_options: dict[str, Any] | None = None
    """Arguments of your own loss; of cross_entropy only {weight: balanced}, or a number for each class instead of
    balanced: in the order of the labels, or by class name, 1 for others. Scaled to a mean of 1 over training images."""
    label_smoothing: Annotated[float, BELOW_ONE] = 0.0
    """Fraction of the target spread over all classes, in [0, 1); must be 0 with your own loss."""
    precision: Literal["fp32", "tf32", "bf16_autocast", "fp16_autocast", "bf16", "fp16"] = "fp32"
    """bf16, fp16: weights, activations and gradients. bf16_autocast, fp16_autocast: activations only. tf32: inputs of
    convolutions and matrix products on a GPU. Master weights, update and batch norm are always fp32."""
    loss_scale: Annotated[float | None, POSITIVE, OnlyFor("precision", SCALED)] = 65536.0
    """Power of two that multiplies the loss, against underflow; only for fp16 and fp16_autocast, else null. A dynamic
    scale starts here; a resumed run takes that of its checkpoint."""
    loss_scale_growth_steps: Annotated[int | None, COUNT, OnlyFor("precision", SCALED, or_null=True)] = 2000
    """Double the loss scale after this many steps without overflow, halve it at each overflow; null: static."""


SCHEDULES = ("polynomial", "cosine", "step", "one_cycle", "cyclic")
WITH_END_LR = ("polynomial", "cosine", "one_cycle", "cyclic")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning rate as a pure function of the step, with a linear warm-up from 0."""

    name: str = "polynomial"
    """Form of the decay after the warm-up: polynomial, cosine, step, one_cycle, cyclic (repeated cycles of rise and
    fall, without a decay), or a function by its import path, such as mypackage.schedules.restarts."""
    base_lr: Annotated[float, POSITIVE] = 1.0
    """Learning rate at the end of the warm-up; with cyclic, in the middle of the first cycle."""
    range_test: Annotated[str | None, PATH] = None
    """Folder or range.json of bigbatch tune range for the same recipe, whose rate base_lr becomes; null: base_lr's."""
    warmup_epochs: Annotated[float, NOT_NEGATIVE] = 5.0
    """Length of the warm-up, in epochs."""
    decay_epochs: Annotated[float | None, POSITIVE] = None
    """Length of the decay after the warm-up, in epochs; then the rate stays at end_lr. null: the whole rest."""
    end_lr: Annotated[float | None, NOT_NEGATIVE, OnlyFor("name", WITH_END_LR)] = 0.0
    """Learning rate at the last step; with cyclic, at the end of each cycle; null for step."""
    options: dict[str, Any] | None = None
    """Settings of polynomial, step and cyclic, or arguments of a function from another package, such as {power: 1.0},
    or one at a time: --schedule.options.power 1.0. null for none."""
    low_momentum: Annotated[float | None, POSITIVE, BELOW_ONE] = None
    """Momentum at learning rate base_lr. It rises to optimizer.momentum as the rate falls to 0 (with cyclic: to
    end_lr). For lars, sgd, muon and shampoo. null: the momentum stays at optimizer.momentum."""


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """How the ranks meet and sum gradients."""

    backend: Literal["auto", "nccl", "tcp", "gloo", "mpi", "horovod"] = "auto"
    """auto: NCCL if every rank has a GPU, else tcp."""
    interface: str | None = None
    """Network interface between the nodes, such as eth0, or several, such as ib0,ib1: NCCL and gloo use all of them,
    bigbatch itself the first. null for that of the route to rank 0."""
    algorithm: Literal["auto", "native", "ring", "hierarchical", "sharded", "doubling", "hybrid"] = "auto"
    """auto: the choice of comm.table; without one, native with NCCL, else hierarchical. native: the backend's own.
    hierarchical: reduce to a leader per node, ring of leaders, broadcast. sharded: reduce-scatter in the node,
    all-reduce between nodes, all-gather in the node. In both, NCCL's own sum between nodes if the backend is NCCL.
    doubling: leaders sum by recursive doubling. hybrid: chosen by buffer size from table."""
    table: Annotated[str | None, PATH] = None
    """File that `bigbatch comm tune` wrote for this cluster and model; null for none."""
    group_size: Annotated[int | None, COUNT] = None
    """Ranks per node group; null for one group per host."""
    wire_dtype: Literal["float16", "bfloat16"] | None = None
    """Precision in which fp32 gradients travel: float16 and bfloat16 halve the bytes; null: not converted."""
    predivide: Annotated[float, POSITIVE] = 1.0
    """Divide gradients by this before a sum in wire_dtype and multiply after it, against overflow."""
    reduce_dtype: Literal["fp32", "wire"] = "fp32"
    """Precision of sums over ranks if gradients travel in half precision. wire: round at each hop."""
    threshold_bytes: Annotated[int | None, POSITIVE] = DEFAULT_SIZES.threshold_bytes
    """Gradients larger than this travel alone, not in a fusion buffer; null: from table."""
    buffer_bytes: Annotated[int | None, POSITIVE] = DEFAULT_SIZES.buffer_bytes
    """Largest fusion buffer; null: from table. The default is that of PyTorch's DistributedDataParallel."""
    first_buffer_bytes: Annotated[int | None, POSITIVE] = None
    """Size of the first buffer; null: from table, else the size of the others."""
    buffers: Literal["torch", "registered", "symmetric"] = "torch"
    """With NCCL, the memory of fusion buffers. registered: allocated by NCCL, which sums it without a copy if the
    hardware allows; symmetric: also at the same address on all ranks, for its NVLink kernels. Not measured yet."""
    warn_seconds: Annotated[float, COUNT] = 20.0
    """Name the ranks that others have waited for this long."""
    timeout_seconds: Annotated[float, COUNT] = 300.0
    """End the job if a peer does not answer for this long."""
    meeting_seconds: Annotated[float, COUNT] = 900.0
    """Time limit of the rendezvous, from the first rank's start to the last one's: a node may still pull a container
    image or read a cold file system. comm.timeout_seconds applies if it is longer."""
    timeline_steps: Annotated[tuple[int, int] | None, NOT_NEGATIVE] = None
    """First and last step to record into timeline.json in the run folder; null for none."""
