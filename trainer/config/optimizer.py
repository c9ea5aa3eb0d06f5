"""Check that the settings of optimizer, loss, metrics, precision and weight average fit each other."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from bigbatch.errors import ConfigError, or_nearest
from bigbatch.trainer.config.dotted import is_import_path
from bigbatch.trainer.config.kinds import check_options
from bigbatch.trainer.config.sections import OPTIMIZERS, CommConfig, OptimizerConfig, RunConfig

STATED_ELSEWHERE = {"lr": "schedule.base_lr", "weight_decay": "optimizer.weight_decay"}
"""Arguments of an optimizer -> the keys of the config that give them."""
WHOLE_MATRIX = ("muon", "shampoo")
"""Optimizers that need whole matrices; ranks divide their work."""
CROSS_ENTROPY, CLASS_WEIGHTS, BALANCED = "cross_entropy", "weight", "balanced"
"""The loss of a config, its only option, and the value of that for weights of n / (classes * images of the class)."""
ENTRY_FIELDS = ("name", "options")
"""Keys of a metric or augmentation with options."""
METRIC = "mypackage.metrics.Balanced"
SMALLEST_SCALE = 1.0
"""The unscaled loss: a smaller scale cannot repair gradients that overflow fp16 (65504) even here."""
LARGEST_SCALE = 2.0**24
"""Raises a gradient of 2**-48 to fp16's smallest number, 2**-24."""

CAPABILITY = {"tf32": (8, 0), "fp16": (5, 3), "fp16_autocast": (5, 3), "bf16": (8, 0), "bf16_autocast": (8, 0)}
"""First CUDA compute capability with arithmetic of that precision (CUDA C++ Programming Guide)."""
TENSOR_CORES = (7, 0)
"""First CUDA compute capability with tensor cores."""


def is_foreign(name: str) -> bool:
    """Return whether the optimizer is an import path, not one of bigbatch's own names."""
    return "." in name


def check_optimizer_name(name: str) -> Iterator[str]:
    """Yield an error for a name that is neither one of OPTIMIZERS nor an import path."""
    if not is_foreign(name) and name not in OPTIMIZERS:
        yield (
            f"optimizer.name={name} is not one of {', '.join(OPTIMIZERS)}"
            f"{or_nearest(name.lower(), OPTIMIZERS)}. Others need an import path, such as "
            "schedulefree.SGDScheduleFree"
        )
    if is_foreign(name) and not is_import_path(name):
        yield f"optimizer.name={name} must be an import path such as schedulefree.SGDScheduleFree"


def check_optimizer(optimizer: OptimizerConfig) -> Iterator[str]:
    name = optimizer.name
    if is_foreign(name):
        yield from _check_foreign(optimizer)
    else:
        yield from check_options("optimizer", name, optimizer.options)
    options = optimizer.options or {}
    if options.get("nesterov") is True and optimizer.momentum == 0:
        yield "optimizer.options.nesterov=True has no meaning with optimizer.momentum=0: set it to false"
    for pattern, factor in (optimizer.lr_factors or {}).items():
        if not isinstance(pattern, str):
            yield f"optimizer.lr_factors: {pattern!r} is not a text: quote it"
        # type(): true would count as 1
        if type(factor) not in (int, float) or not 0 < factor < math.inf:
            yield f"optimizer.lr_factors: {pattern!r} has {factor!r}: give each pattern a positive, finite number"
    if name in ("lamb", "adamw", "shampoo") and options.get("eps") == 0:
        yield f"optimizer.name={name} needs an optimizer.options.eps above 0: give a value, 1e-6 is usual"
    scale, decay, every_steps = optimizer.loss_scale, optimizer.ema_decay, optimizer.ema_every_steps
    if scale is not None and scale != nearest_scale(scale):
        yield (
            f"optimizer.loss_scale={scale:g} must be a power of two from {SMALLEST_SCALE:g} to {LARGEST_SCALE:g}, so "
            f"that scaling rounds nothing: {nearest_scale(scale):g} is the nearest"
        )
    if decay is not None and every_steps is None:
        yield f"optimizer.ema_every_steps is null, but optimizer.ema_decay={decay} needs it: 1 is usual"
    if decay is None and every_steps is not None:
        yield f"optimizer.ema_every_steps={every_steps} has no meaning without optimizer.ema_decay: set it to null"
    if decay is None and not optimizer.ema_warmup:
        yield "optimizer.ema_warmup=false has no meaning without optimizer.ema_decay: leave it out"


def _check_foreign(optimizer: OptimizerConfig) -> Iterator[str]:
    if optimizer.sharded:
        yield (
            f"optimizer.sharded=True conflicts with optimizer.name={optimizer.name}, which may need whole tensors: "
            f"set it to false, or take one of {', '.join(OPTIMIZERS)}"
        )
    for argument, key in STATED_ELSEWHERE.items():
        if argument in (optimizer.options or {}):
            yield f"optimizer.options must not state {argument}: set {key} instead"
    if "fused" in (optimizer.options or {}):
        yield (
            "optimizer.options must not state fused: if the first update is skipped, torch's fused kernels read memory "
            f"that was never written. Leave it out, or take one of {', '.join(OPTIMIZERS)}"
        )


def check_sharded(optimizer: OptimizerConfig, comm: CommConfig) -> Iterator[str]:
    """Yield an error for each setting that optimizer.sharded contradicts."""
    if comm.wire_dtype is not None:
        yield (
            f"comm.wire_dtype={comm.wire_dtype} conflicts with optimizer.sharded=True, which sends gradients in "
            "their own precision: set it to null, and optimizer.precision to bf16 for half the bytes"
        )
    if optimizer.ema_decay is not None:
        yield (
            f"optimizer.ema_decay={optimizer.ema_decay} conflicts with optimizer.sharded=True, which keeps no whole "
            "weights to average: set one of them to null or false"
        )


def optimizer_notes(settings: OptimizerConfig) -> list[str]:
    """List the lines that the log prints about an optimizer."""
    notes = []
    if is_foreign(settings.name):
        notes += [f"{settings.name} cannot skip updates on the device: the host waits for the device every step"]
    if settings.ema_decay is not None:
        first = f"from step {settings.ema_every_steps} on"
        notes += [f"evaluations are of the moving average of the weights (optimizer.ema_decay), {first}"]
    if settings.sharded:
        notes += ["sharded update: gradients travel by reduce-scatter, weights by all-gather, not by comm.algorithm"]
    return notes


def check_class_weights(options: Mapping[str, Any], *, num_classes: int) -> Iterator[str]:
    """Yield an error for options of the cross-entropy that are not its weights of classes."""
    weight = options.get(CLASS_WEIGHTS)
    numbers = weight.values() if isinstance(weight, dict) else weight if isinstance(weight, list | tuple) else [-1]
    is_legal = weight == BALANCED or all(type(each) in (int, float) and 0 <= each < math.inf for each in numbers)
    if not (options.keys() == {CLASS_WEIGHTS} and is_legal):
        yield (
            f"optimizer.loss_options={options} must be {{{CLASS_WEIGHTS}: {BALANCED}}} with optimizer.loss="
            f"{CROSS_ENTROPY}, a list of numbers of at least 0, one for each class, or numbers by class name; or null"
        )
    elif isinstance(weight, list | tuple) and len(weight) != num_classes:
        yield (
            f"optimizer.loss_options: {CLASS_WEIGHTS} has {len(weight)} numbers for data.num_classes="
            f"{num_classes}: give each class one"
        )


def check_loss(optimizer: OptimizerConfig, run: RunConfig) -> Iterator[str]:
    """Yield an error for a loss of unknown form that is not the cross-entropy, and for settings without meaning."""
    loss = optimizer.loss
    if not is_import_path(loss):
        yield (
            f"optimizer.loss={loss} must be {CROSS_ENTROPY} or the import path of a loss, such as "
            "mypackage.losses.Focal"
        )
    if optimizer.label_smoothing:
        yield (
            f"optimizer.label_smoothing={optimizer.label_smoothing} has no meaning with optimizer.loss={loss}: set it "
            "to 0, and let the loss do it by optimizer.loss_options"
        )
    if run.divergence_steps is not None:
        yield (
            f"run.divergence_steps={run.divergence_steps} compares the loss with the cross-entropy of a guess, which "
            f"does not apply to optimizer.loss={loss}: set it to null"
        )


def check_entries(key: str, entries: Mapping[str, Any] | None, *, kind: str, example: str) -> Iterator[str]:
    """Yield an error for each name or entry of another form. kind: metric or augmentation; example: an import path."""
    article = "an" if kind[0] in "aeiou" else "a"
    for name, entry in (entries or {}).items():
        if not (isinstance(name, str) and name.isidentifier()):
            yield f"{key}: {name!r} is not a legal name of {article} {kind}: use letters, digits and _"
            continue
        stated = entry if isinstance(entry, dict) else {"name": entry}
        options = stated.get("options")
        is_known = set(stated) <= set(ENTRY_FIELDS) and (options is None or isinstance(options, dict))
        if not (is_known and isinstance(stated.get("name"), str) and is_import_path(stated["name"])):
            yield (
                f"{key}: {name} is {entry!r}: give an import path, such as {example}, or "
                f"{{name: {example}, options: {{...}}}}"
            )


def named_entries(entries: Mapping[str, Any] | None) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the name, import path and options of each metric or augmentation."""
    for name, entry in (entries or {}).items():
        stated = entry if isinstance(entry, dict) else {"name": entry}
        yield name, stated["name"], stated.get("options") or {}


def nearest_scale(scale: float) -> float:
    """Return the legal loss scale nearest to a positive number: a power of two."""
    lower = 2.0 ** math.floor(math.log2(scale))
    nearest = min((lower, 2 * lower), key=lambda power: abs(power - scale))
    return min(max(nearest, SMALLEST_SCALE), LARGEST_SCALE)


def require_hardware(precision: str, *, capability: tuple[int, int], device: str) -> None:
    """Raise ConfigError if a GPU of that CUDA compute capability has no arithmetic of that precision."""
    if capability < CAPABILITY.get(precision, (0, 0)):
        legal = [name for name in ("fp32", *CAPABILITY) if capability >= CAPABILITY.get(name, (0, 0))]
        needed, found = (".".join(map(str, pair)) for pair in (CAPABILITY[precision], capability))
        raise ConfigError(
            f"optimizer.precision={precision} needs a GPU of compute capability {needed} or later, and {device} has "
            f"{found}: set it to {' or '.join(legal)}"
        )


def precision_notice(precision: str, *, capability: tuple[int, int] | None) -> str | None:
    """Return a line about the speed to expect, or None. capability: CUDA's; None: a CPU."""
    if precision not in CAPABILITY or (capability is not None and capability >= TENSOR_CORES):
        return None
    if capability is not None:
        return (
            f"optimizer.precision={precision} saves memory here; its speed comes from tensor cores, which GPUs before "
            f"compute capability 7.0 do not have (this one: {capability[0]}.{capability[1]})"
        )
    if precision == "tf32":
        return "optimizer.precision=tf32 trains as fp32 on a CPU, which has no TF32"
    return (
        f"optimizer.precision={precision} on a CPU gives the numbers of half precision; it may be slower than fp32, "
        "or faster if the CPU has instructions for it (AVX512-BF16, AMX)"
    )
