"""Check that precision, loss scale, moving average and the GPU's hardware fit each other."""

import math
from collections.abc import Iterator

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.sections import OptimizerConfig

SMALLEST_SCALE = 1.0
"""The unscaled loss: a smaller scale cannot repair gradients that overflow fp16 (65504) even here."""
LARGEST_SCALE = 2.0**24
"""Lifts gradients down to 2**-48 to fp16's smallest number, 2**-24."""

CAPABILITY = {"tf32": (8, 0), "fp16": (5, 3), "fp16_autocast": (5, 3), "bf16": (8, 0), "bf16_autocast": (8, 0)}
"""First CUDA compute capability with arithmetic of that precision (CUDA C++ Programming Guide)."""
TENSOR_CORES = (7, 0)
"""First CUDA compute capability that has them."""


def check_precision(optimizer: OptimizerConfig) -> Iterator[str]:
    """Check the loss scale."""
    scale = optimizer.loss_scale
    if scale is not None and scale != nearest_scale(scale):
        yield (
            f"optimizer.loss_scale={scale:g} must be a power of two from {SMALLEST_SCALE:g} to {LARGEST_SCALE:g}, so "
            f"that scaling rounds nothing: {nearest_scale(scale):g} is the nearest"
        )


def nearest_scale(scale: float) -> float:
    """Return the power of two nearest to a positive number, within what a loss scale may be."""
    lower = 2.0 ** math.floor(math.log2(scale))
    nearest = min((lower, 2 * lower), key=lambda power: abs(power - scale))
    return min(max(nearest, SMALLEST_SCALE), LARGEST_SCALE)


def check_average(optimizer: OptimizerConfig) -> Iterator[str]:
    """Check that an average of the weights has both of its settings."""
    decay, every_steps = optimizer.ema_decay, optimizer.ema_every_steps
    if decay is not None and every_steps is None:
        yield f"optimizer.ema_every_steps is null, but optimizer.ema_decay={decay} needs it: 1 is usual"
    if decay is None and every_steps is not None:
        yield f"optimizer.ema_every_steps={every_steps} has no meaning without optimizer.ema_decay: set it to null"


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
        "or faster where the CPU has instructions for it (AVX512-BF16, AMX)"
    )
