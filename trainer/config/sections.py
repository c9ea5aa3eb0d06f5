"""The sections of an experiment. Each key is one field: its type, legal numbers and choices, default and help."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from bigbatch.trainer.config.fields import (
    ABOVE_ZERO,
    BELOW_2_63,
    BELOW_ONE,
    COUNT,
    MEGAPIXELS,
    NOT_NEGATIVE,
    PATH,
    POSITIVE,
    SHARE,
    OnlyFor,
)

RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")
MODELS = (*RESNETS, "alexnet_bn", "resnet9")
READERS = ("dali", "torchvision")  # loaders that read images while training
# each is made by the module of its name in trainer/optim
OPTIMIZERS = ("lars", "lamb", "sgd", "adamw", "muon", "shampoo")
SCALED = ("fp16", "fp16_autocast")  # precisions with a loss scale


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """These keys say where the run goes, how long it lasts and what it writes."""

    directory: Annotated[str, PATH] = "runs/{name}"
    """Run folder for config, metrics, checkpoints, plot and summary; {name} in it is the name of the config's file."""
    seed: Annotated[int, NOT_NEGATIVE, BELOW_2_63] = 0
    """Seed of weights, sample order and every draw of the input."""
    epochs: Annotated[int, COUNT] = 90
    """Passes over the training set."""
    log_every_steps: Annotated[int, COUNT] = 20
    """Steps between two reports (sums over ranks, one host sync)."""
    eval_every_epochs: Annotated[int, COUNT] = 1
    """Epochs between two evaluations; the last epoch is always evaluated."""
    eval_offset_epochs: Annotated[int, NOT_NEGATIVE] = 0
    """Epoch of the first evaluation, below eval_every_epochs; 0 for the first after eval_every_epochs."""
    checkpoint_every_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between two checkpoints, besides the one after each evaluation; 0 for those alone."""
    keep_checkpoints: Annotated[int, COUNT] = 2
    """Newest checkpoints to keep, besides the best."""
    memory_every_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps, up to the next report, between two copies of the run's state in the memory of every node, in /dev/shm; 0
    for none. A run that lost ranks or nodes goes on from the newest that is left, and reads no disk."""
    compare_every_steps: Annotated[int, NOT_NEGATIVE] = 100
    """Steps, up to the next report, between two comparisons of all ranks' weights and optimizer state, besides those at
    the start and before each checkpoint; 0 for none. Where they differ the run goes back to the newest checkpoint on
    which they agreed."""
    reproducible: bool = False
    """The same bits at the end on any number of ranks and nodes, by any algorithm, backend and fusion plan, and after
    any resume, as long as batch.microbatch_size, the kind of device and the versions stay: gradients are summed as
    integers, and kernels are deterministic. Sums take twice the bytes, and CPUs compute with compute.cpu_threads."""
    digest_every_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between two records of digests (images, gradients before and after their sum, weights and optimizer
    state), by which bigbatch diff finds where two runs part; 0 for none."""
    digest_layers: tuple[str, ...] | None = None
    """Layers whose activations are digested in these steps, too, by patterns of their names, such as [layer1.*, fc];
    null for none."""
    digest_values: tuple[str, ...] | None = None
    """Of what is digested in these steps, the gradients and activations to keep whole, too, in the run folder, so that
    bigbatch diff names elements of them: patterns of the names of parameters and of digest_layers; null for none."""
    noise_scale_every_steps: Annotated[int, NOT_NEGATIVE] = 0
    """Steps between two measurements of the gradient noise scale, which tells near which global batch more images in
    a step begin to save few steps; 0 for none. Needs two microbatches of whole ghost batches in a global batch."""
    checkpoint_timeout_seconds: Annotated[float, COUNT] = 600.0
    """A checkpoint, or the plot at the end, that is not written after this long ends the job; comm.timeout_seconds does
    not count meanwhile."""
    resume: Annotated[str, PATH] = "auto"
    """auto: go on from the newest checkpoint of the run folder, if any; never: refuse a used run folder;
    else the path of a checkpoint to start from."""
    metrics: dict[str, Any] | None = None
    """Own figures of an evaluation: names, and the dotted name of what gives numbers for each image, such as
    {balanced: mypackage.metrics.Balanced}, or {name, options} where it takes arguments. null for none."""
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ("tensorboard",)
    """What else gets the numbers of metrics.jsonl: tensorboard, wandb (Weights & Biases). One that fails, or finds no
    network, is said once, and the run goes on. [] for none."""
    target_top1: Annotated[float | None, ABOVE_ZERO] = None
    """End the run at the evaluation that reaches this top-1, in (0, 1]; null to run all epochs."""
    stop_metric: str | None = None
    """Figure of the evaluation that must go on improving: top1, top5 or loss; null for no early stopping."""
    stop_after_evaluations: Annotated[int | None, COUNT] = None
    """End the run after so many evaluations without a better stop_metric; null without one."""
    divergence_steps: Annotated[int | None, COUNT] = None
    """End the run when its training loss was no better than a guess (ln of the number of classes) for so many steps
    after the warm-up; null to go on whatever the loss is, as long as it is a number. A run with fewer steps (a recipe
    tried for an epoch) is not watched."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """These keys name the images, and say what is done to them."""

    loader: Literal["dali", "torchvision", "resident", "synthetic"] = "dali"
    """dali: decode and resize ahead, on the GPU where there is one; torchvision: the same in Pillow threads;
    resident: whole set decoded once on the device; synthetic: generated tensors, for measuring."""
    resident_on: Annotated[Literal["device", "host"] | None, OnlyFor("loader", ("resident",))] = "device"
    """Whose memory resident keeps the set in. host: batches are cropped there and copied to the device at each step,
    which shows what the device's memory is worth. null but for resident."""
    root: Annotated[str, PATH] = "data/imagenet"
    """Folder with train/<class>/<image> and val/<class>/<image>, or a list of images by bigbatch init; unused by
    synthetic."""
    num_classes: Annotated[int, COUNT] = 1000
    """Classes of the data set and outputs of the model."""
    num_synthetic_samples: Annotated[int | None, COUNT, OnlyFor("loader", ("synthetic",))] = None
    """Size of the generated training set and of the validation set; null for every other loader."""
    image_size: Annotated[int, COUNT] = 224
    """Height and width of the images that the model sees, in pixels; in training, as long as train_sizes is null."""
    train_sizes: tuple[tuple[int, int], ...] | None = None
    """Progressive resizing: pairs of an epoch and the size of training images from it on; null for image_size."""
    crop: Literal["resized", "padded"] = "resized"
    """Training crop. resized: random area and aspect ratio (ImageNet); padded: shift by up to 4 pixels (CIFAR)."""
    crop_area_min: Annotated[float | None, ABOVE_ZERO, OnlyFor("crop", ("resized",))] = 0.08
    """Smallest share of the image's area in a resized crop, in (0, 1]; null for padded."""
    flip: bool = True
    """Mirror half of the training images."""
    eval_crop_fraction: Annotated[float, ABOVE_ZERO] = 0.875
    """Side of the central evaluation crop as a share of the image's shorter side, in (0, 1]."""
    eval_flip: bool = False
    """Evaluate each image and its mirror image, and add up the two outputs (test-time flip)."""
    mean: Annotated[tuple[float, float, float], SHARE] = (0.485, 0.456, 0.406)
    """Channel means (red, green, blue) on the scale 0 to 1; the default is ImageNet's, as torchvision has it."""
    std: Annotated[tuple[float, float, float], POSITIVE] = (0.229, 0.224, 0.225)
    """Channel standard deviations (red, green, blue) on the scale 0 to 1; the default is ImageNet's, too."""
    max_skipped: Annotated[int | None, NOT_NEGATIVE, OnlyFor("loader", READERS, or_null=True)] = None
    """Bad images for which others stand in, counted and listed in the summary; null to end at the first one."""
    max_megapixels: Annotated[float, MEGAPIXELS] = 50.0
    """An image of more million pixels is bad, by what its header states: decoded, each takes 4 MB, in every thread."""
    num_threads: Annotated[int, COUNT] = 4
    """Decoding threads per rank."""
    prefetch_batches: Annotated[int, COUNT] = 2
    """Microbatches prepared ahead of use."""
    patience_seconds: Annotated[float, COUNT] = 20.0
    """An image that cannot be read is tried again for so long; then the run saves a checkpoint and ends."""
    stage: Annotated[str | None, PATH, OnlyFor("loader", READERS, or_null=True)] = None
    """Folder of each node into which packed data are copied before the run, such as one on a local disk or in
    /dev/shm; null to read from root."""
    keep_staged: bool = True
    """Leave the copy in stage for the next run; false removes it as the run ends, where no other run of that node has
    it."""
    bind_numa: bool = True
    """Keep each rank on the cores beside its GPU, or beside its memory, where a node has several NUMA domains."""
    probe_seconds: Annotated[float, NOT_NEGATIVE] = 1.0
    """How long to measure what the input can deliver on its own, before the first step; 0 for not at all."""


@dataclass(frozen=True, kw_only=True)
class AugmentConfig:
    """Training images are changed so on the model's device, after crop and flip, in this order; 0 for not at all."""

    color_jitter: Annotated[float, NOT_NEGATIVE] = 0.0
    """Brightness, contrast and saturation change by up to this share, in random order."""
    randaugment_ops: Annotated[int, NOT_NEGATIVE] = 0
    """Random operations on each image (RandAugment)."""
    randaugment_magnitude: Annotated[int | None, NOT_NEGATIVE] = None
    """Their strength, 0 to 30; null without operations."""
    cutout_size: Annotated[int, NOT_NEGATIVE] = 0
    """Side of a square that is wiped out, in pixels."""
    mixup_alpha: Annotated[float, NOT_NEGATIVE] = 0.0
    """Blend each image and its label with another of its ghost batch; the share is of Beta(alpha, alpha)."""
    cutmix_alpha: Annotated[float, NOT_NEGATIVE] = 0.0
    """Put a box of another image of the ghost batch into each. With both, each ghost batch gets one of the two."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """These keys describe the classifier."""

    name: str = "resnet50"
    """resnet18, resnet34, resnet50, resnet101, resnet152 (v1.5), alexnet_bn, resnet9 (David Page's), torchvision:NAME,
    timm:NAME, or the dotted name of any other torch.nn.Module, such as mypackage.models.Net."""
    options: dict[str, Any] | None = None
    """Settings of resnet9 and the ResNets, or arguments of a model of another package, such as {width: 32}; also one by
    one, as --model.options.width 32. null for none."""
    init: Literal["fan_in", "fan_out", "xavier"] | None = None
    """Start of the weights of convolutions and linear layers, normal of standard deviation sqrt(2 / fan_in), sqrt(2 /
    fan_out) or sqrt(2 / (fan_in + fan_out)), with biases of 0; null for the model's own."""
    linear_std: Annotated[float | None, POSITIVE] = None
    """Standard deviation of a normal start of linear layers, such as 0.01; null for what init says."""
    weights: Annotated[str | None, PATH] = None
    """Weights to start from: a checkpoint folder, a file with a state_dict of ours, torchvision's or timm's, or
    torchvision:NAME or timm:NAME for what these have downloaded; null for random ones from run.seed. A resumed run has
    its own."""
    new_head: bool = False
    """The last layer starts from random weights, and not from those in model.weights, which may be of other classes."""
    partial_weights: tuple[str, ...] | None = None
    """Patterns of names, such as [conv1.*, layer1.0.*], of what is taken from model.weights, which may be of a
    shallower network; all else starts as without. null to take all."""
    frozen: tuple[str, ...] | None = None
    """Patterns of names, such as layer1.*, of weights that stay as they are. Batch norms whose running statistics they
    name, too, compute as in evaluation. null to train all."""


@dataclass(frozen=True, kw_only=True)
class BatchConfig:
    """The batch is global: any number of ranks gives the same update."""

    global_batch_size: Annotated[int, COUNT] = 256
    """Samples per update, over all ranks and accumulation steps."""
    microbatch_size: Annotated[int, COUNT] = 32
    """Samples per rank per forward pass; accumulation steps follow from it."""
    bn_span: Annotated[int, COUNT] = 32
    """Samples over which batch norm takes its statistics (a ghost batch): divides microbatch_size, or is a multiple of
    it, which then counts over neighbouring ranks."""
    virtual_ranks: Annotated[int | None, COUNT] = None
    """Ranks whose updates to replay, by accumulation, on the ranks of the job; null for those of the job."""


@dataclass(frozen=True, kw_only=True)
class ComputeConfig:
    """These keys say how forward and backward are computed: speed and memory, never what is learned."""

    compile: Literal["default", "max-autotune"] | None = None
    """torch.compile of the model's forward; max-autotune also tries several kernels for each operation, which takes
    minutes longer. null for none."""
    compile_fallback: bool = False
    """Go on without, and say so, where this machine cannot compile; else end there. false without compile."""
    cuda_graph: bool = False
    """Capture the whole step, the sums over ranks included, and replay it by one launch for each microbatch: for small
    local batches, where launches take longer than the work. Needs a GPU, and NCCL where there are several ranks."""
    channels_last: bool = True
    """Images and weights in NHWC memory, which tensor cores and oneDNN take as they are."""
    cudnn_benchmark: bool = True
    """Let cuDNN try its algorithms on each new shape and keep the fastest; without effect on a CPU."""
    cpu_threads: Annotated[int | None, COUNT] = None
    """Threads with which a rank computes on a CPU, which decide how its sums are rounded; null for its share of the
    machine's cores, or 1 with run.reproducible."""
    recomputed_blocks: Annotated[int, NOT_NEGATIVE] = 0
    """Residual blocks, counted from the input, whose activations are not kept but computed again in backward."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """These keys describe the update."""

    name: str = "lars"
    """lars, lamb, sgd, adamw, muon, shampoo, or any other class by its dotted name, as schedulefree.SGDScheduleFree."""
    momentum: Annotated[float | None, BELOW_ONE, OnlyFor("name", ("lars", "sgd", "muon", "shampoo"))] = 0.9
    """Share of the last update that is kept, in [0, 1); null but for lars, sgd, muon and shampoo."""
    nesterov: Annotated[bool | None, OnlyFor("name", ("lars", "sgd", "muon", "shampoo"))] = False
    """Nesterov's momentum; null but for lars, sgd, muon and shampoo."""
    betas: Annotated[tuple[float, float] | None, BELOW_ONE, OnlyFor("name", ("lamb", "adamw"))] = (0.9, 0.999)
    """Shares of the running means of gradients and of their squares that are kept; null but for lamb and adamw."""
    weight_decay: Annotated[float, NOT_NEGATIVE] = 1e-4
    """Decay of weights: L2 in lars, sgd and shampoo, decoupled in lamb, adamw and (of matrices) muon."""
    exclude_bias_and_norm: bool = True
    """Bias and batch norm neither decay nor adapt (Jia et al. 2018: worth 1.3% top-1)."""
    bias_lr_factor: Annotated[float, POSITIVE] = 1.0
    """The learning rate of biases, batch norm's too, is the schedule's times this, and their decay is divided by it."""
    lr_factors: dict[str, Any] | None = None
    """Factors on the schedule's learning rate by patterns of weights' names, such as {"fc.*": 1, "*": 0.1}, of which
    the first that matches counts; weights that none names have 1. null for no such factors."""
    trust_coefficient: Annotated[float | None, POSITIVE, OnlyFor("name", ("lars",))] = 0.001
    """LARS eta; null but for lars."""
    eps: Annotated[float | None, NOT_NEGATIVE, OnlyFor("name", ("lars", "lamb", "adamw", "shampoo"))] = 0.0
    """Added to a denominator: of the trust ratio in lars, of the update in lamb and adamw. In shampoo the least that an
    eigenvalue counts, as a share of the largest; null for the others."""
    momentum_form: Annotated[Literal["lr_inside", "lr_outside"] | None, OnlyFor("name", ("lars",))] = "lr_inside"
    """lr_inside: the MLPerf reference; lr_outside: NVIDIA's; null but for lars."""
    options: dict[str, Any] | None = None
    """Settings of muon and shampoo, or arguments of a class of another package, such as {block_size: 512}; also one by
    one, as --optimizer.options.block_size 512. null for none."""
    sharded: bool = False
    """Each rank updates a share of the weights and keeps the optimizer's state of that share alone. Gradients then
    travel by the backend's own reduce-scatter, whatever comm.algorithm is."""
    clip_norm: Annotated[float | None, POSITIVE] = None
    """Largest L2 norm of all gradients together; longer ones are scaled down to it. null for none."""
    ema_decay: Annotated[float | None, BELOW_ONE] = None
    """Share of the moving average of the weights that is kept at each of its steps, in [0, 1), and at most
    (1 + n) / (10 + n) at the n-th: the average is what is evaluated. null for no average."""
    ema_every_steps: Annotated[int | None, COUNT] = None
    """Steps between two steps of the average; null without one."""
    loss: str = "cross_entropy"
    """cross_entropy, or the dotted name of an own loss that gives a number for each image, such as
    mypackage.losses.Focal."""
    loss_options: dict[str, Any] | None = None
    """Arguments of an own loss; null for cross_entropy."""
    label_smoothing: Annotated[float, BELOW_ONE] = 0.0
    """Share of the target spread over all classes, in [0, 1); 0 with an own loss."""
    precision: Literal["fp32", "tf32", "bf16_autocast", "fp16_autocast", "bf16", "fp16"] = "fp32"
    """bf16, fp16: of weights, activations and gradients. bf16_autocast, fp16_autocast: of activations alone. tf32: of
    the factors in convolutions and matrix products on a GPU. Master weights, update and batch norm are fp32 always."""
    loss_scale: Annotated[float | None, POSITIVE, OnlyFor("precision", SCALED)] = 65536.0
    """The loss is multiplied by this power of two, against underflow; null but for fp16 and fp16_autocast. A scale that
    changes is this one at first, and in a resumed run the one of its checkpoint."""
    loss_scale_growth_steps: Annotated[int | None, COUNT, OnlyFor("precision", SCALED, or_null=True)] = 2000
    """Double the loss scale after so many steps without overflow, halve it at each overflow; null for a static one."""


WITH_END_LR = ("polynomial", "cosine", "one_cycle", "cyclic")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate is a pure function of the step, with a linear warm-up from 0."""

    name: Literal["polynomial", "cosine", "step", "one_cycle", "cyclic"] = "polynomial"
    """Form of the decay after the warm-up; cyclic goes up and down again and again instead."""
    base_lr: Annotated[float, POSITIVE] = 1.0
    """Learning rate at the end of the warm-up; of cyclic, in the middle of the first cycle."""
    range_test: Annotated[str | None, PATH] = None
    """Folder or range.json of bigbatch tune range, of the same recipe, whose suggestion base_lr is then; null to state
    base_lr."""
    warmup_epochs: Annotated[float, NOT_NEGATIVE] = 5.0
    """Length of the warm-up, in epochs."""
    decay_epochs: Annotated[float | None, POSITIVE] = None
    """Length of the decay that follows, in epochs, after which end_lr stays; null for the rest of the run, and for
    step."""
    end_lr: Annotated[float | None, NOT_NEGATIVE, OnlyFor("name", WITH_END_LR)] = 0.0
    """Learning rate at the last step; of cyclic, at the end of each cycle; null for step."""
    options: dict[str, Any] | None = None
    """Settings of polynomial, step and cyclic, such as {power: 1.0}; also one by one, as --schedule.options.power 1.0.
    null for none."""
    low_momentum: Annotated[float | None, POSITIVE, BELOW_ONE] = None
    """The momentum mirrors the learning rate: optimizer.momentum where that is 0 (of cyclic: end_lr), and this where it
    is base_lr, for lars, sgd, muon and shampoo. null to keep optimizer.momentum."""


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """These keys say how gradients go over the wire."""

    backend: Literal["auto", "nccl", "tcp", "gloo", "mpi", "horovod"] = "auto"
    """auto: NCCL where every rank has a GPU, else tcp."""
    interface: str | None = None
    """Network interface between the nodes, such as eth0; null for the one that leads to rank 0; of several, as ib0,ib1,
    NCCL and gloo use all, and we the first."""
    algorithm: Literal["auto", "native", "ring", "hierarchical", "sharded", "doubling", "hybrid"] = "auto"
    """auto: as table says; without one native with NCCL, hierarchical elsewhere; native: the backend's own;
    hierarchical: reduce to a leader per node, ring of leaders, broadcast; sharded: reduce-scatter in the node,
    all-reduce across, all-gather in the node; doubling: leaders sum by recursive doubling; hybrid: by the size of the
    buffer, as table says."""
    calibrate: Literal["auto", "never", "always"] = "auto"
    """Of algorithm auto. auto: without table the first start on a cluster of several nodes measures one, for up to 10
    seconds, and later ones take it; always: every start with several ranks measures; never: none does, nor takes one.
    Tables change how sums are rounded."""
    table: Annotated[str | None, PATH] = None
    """File that `bigbatch comm tune` made for this cluster and model; null for none."""
    group_size: Annotated[int | None, COUNT] = None
    """Ranks per node group; null for one group per host."""
    wire_dtype: Literal["float16", "bfloat16"] | None = None
    """Precision of fp32 gradients between ranks: float16 and bfloat16 halve the bytes; null for their own."""
    predivide: Annotated[float, POSITIVE] = 1.0
    """Gradients are divided by this before a sum in wire_dtype and multiplied after, against overflow."""
    reduce_dtype: Literal["fp32", "wire"] = "fp32"
    """Precision of sums over ranks of gradients that travel in half precision: fp32, or rounded at each hop."""
    threshold_bytes: Annotated[int | None, POSITIVE] = 26_214_400
    """Gradients larger than this travel alone; null for what table says."""
    buffer_bytes: Annotated[int | None, POSITIVE] = 26_214_400
    """Largest fusion buffer; null for what table says. The default is that of PyTorch's DistributedDataParallel."""
    first_buffer_bytes: Annotated[int | None, POSITIVE] = None
    """Size of the first buffer; null for what table says, or the same as the others."""
    buffers: Literal["torch", "registered", "symmetric"] = "torch"
    """With NCCL, the memory of fusion buffers. registered: NCCL's own, registered with it, which it sums without a copy
    where the hardware allows; symmetric: at the same place on all ranks, too, for its kernels over NVLink. Not measured
    yet."""
    warn_seconds: Annotated[float, COUNT] = 20.0
    """Ranks that others have waited for so long are named."""
    timeout_seconds: Annotated[float, COUNT] = 300.0
    """A peer that does not answer for this long ends the job."""
    meeting_seconds: Annotated[float, COUNT] = 900.0
    """How long the ranks wait for the last one at the start, where that is longer than timeout_seconds: an image may
    still be pulled, or a file system be cold."""
    timeline_steps: Annotated[tuple[int, int] | None, NOT_NEGATIVE] = None
    """First and last step to record into timeline.json in the run's folder; null for none."""
