"""Check that the optimizer settings fit each other."""

import math
from collections.abc import Iterator

from bigbatch.errors import or_nearest
from bigbatch.trainer.config.dotted import is_dotted
from bigbatch.trainer.config.kinds import check_options
from bigbatch.trainer.config.sections import OPTIMIZERS, CommConfig, OptimizerConfig

STATED_ELSEWHERE = {"lr": "schedule.base_lr", "weight_decay": "optimizer.weight_decay"}
"""Arguments of an optimizer -> the keys of the config that give them."""


WHOLE = ("muon", "shampoo")
"""Optimizers that need whole matrices; ranks divide their work."""


def is_foreign(name: str) -> bool:
    """Tell whether the optimizer is an import path, not one of bigbatch's own names."""
    return "." in name


def check_optimizer_name(name: str) -> Iterator[str]:
    """Yield an error for a name that is neither one of OPTIMIZERS nor an import path."""
    if not is_foreign(name) and name not in OPTIMIZERS:
        yield (
            f"optimizer.name={name} is none of {', '.join(OPTIMIZERS)}"
            f"{or_nearest(name.lower(), OPTIMIZERS)}. Others need an import path, such as "
            "schedulefree.SGDScheduleFree"
        )
    if is_foreign(name) and not is_dotted(name):
        yield f"optimizer.name={name} must be an import path such as schedulefree.SGDScheduleFree"


def check_optimizer(optimizer: OptimizerConfig) -> Iterator[str]:
    """Yield an error for each pair of settings that contradict each other."""
    name = optimizer.name
    if is_foreign(name):
        yield from _check_foreign(optimizer)
    else:
        yield from check_options("optimizer", name, optimizer.options)
    if optimizer.nesterov and optimizer.momentum == 0:
        yield "optimizer.nesterov=True has no meaning with optimizer.momentum=0: set it to false"
    for pattern, factor in (optimizer.lr_factors or {}).items():
        # type(): true would count as 1
        if type(factor) not in (int, float) or not 0 < factor < math.inf:
            yield f"optimizer.lr_factors: {pattern!r} has {factor!r}: give each pattern a positive, finite number"
    if name in ("lamb", "adamw", "shampoo") and optimizer.eps == 0:
        yield f"optimizer.name={name} needs an optimizer.eps above 0: give a value, 1e-6 is usual"


def _check_foreign(optimizer: OptimizerConfig) -> Iterator[str]:
    if optimizer.sharded:
        yield (
            f"optimizer.sharded=True does not go with optimizer.name={optimizer.name}, which may need whole tensors: "
            f"set it to false, or take one of {', '.join(OPTIMIZERS)}"
        )
    for argument, key in STATED_ELSEWHERE.items():
        if argument in (optimizer.options or {}):
            yield f"optimizer.options must not give {argument}: {key} does"
    if "fused" in (optimizer.options or {}):
        yield (
            "optimizer.options must not give fused: if the first update is skipped, torch's fused kernels read memory "
            f"that was never written. Leave it out, or take one of {', '.join(OPTIMIZERS)}"
        )


def check_sharded(optimizer: OptimizerConfig, comm: CommConfig) -> Iterator[str]:
    """Yield an error for each setting that a sharded update cannot have."""
    if not optimizer.sharded:
        return
    if comm.wire_dtype is not None:
        yield (
            f"comm.wire_dtype={comm.wire_dtype} does not go with optimizer.sharded=True, which sends gradients in "
            "their own precision: set it to null, and optimizer.precision to bf16 for half the bytes"
        )
    if optimizer.ema_decay is not None:
        yield (
            f"optimizer.ema_decay={optimizer.ema_decay} does not go with optimizer.sharded=True, which keeps no whole "
            "weights to average: set one of them to null or false"
        )


def optimizer_notes(settings: OptimizerConfig) -> list[str]:
    """List the lines that the log prints about an optimizer."""
    notes = []
    if is_foreign(settings.name):
        notes += [f"{settings.name} cannot skip updates on the device: the host waits for the device every step"]
    if settings.sharded:
        notes += ["sharded update: gradients travel by reduce-scatter, weights by all-gather, not by comm.algorithm"]
    return notes
