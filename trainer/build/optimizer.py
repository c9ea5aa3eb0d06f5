"""Build the optimizer of a config, over groups of the parameters to update."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.kinds import with_default_options
from bigbatch.trainer.config.optimizer import WHOLE_MATRIX, is_foreign
from bigbatch.trainer.config.sections import OptimizerConfig
from bigbatch.trainer.optim.foreign import find_optimizer, has_modes, use_training_weights
from bigbatch.trainer.optim.lamb import LAMB
from bigbatch.trainer.optim.lars import LARS
from bigbatch.trainer.optim.lion import Lion
from bigbatch.trainer.optim.matrices import apart
from bigbatch.trainer.optim.muon import Muon
from bigbatch.trainer.optim.param_groups import param_groups
from bigbatch.trainer.optim.shampoo import Shampoo

Groups = list[dict[str, Any]]


def make_optimizer(
    settings: OptimizerConfig, model: nn.Module, masters: Mapping[str, Tensor], *, lr: float
) -> torch.optim.Optimizer:
    """Make the optimizer of a config over the masters of a model's parameters. Raises: ConfigError."""
    try:
        groups = param_groups(
            model,
            weight_decay=settings.weight_decay,
            exclude_bias_and_norm=settings.exclude_bias_and_norm,
            bias_lr_factor=settings.bias_lr_factor,
            lr_factors=settings.lr_factors,
            substitute=masters,
        )
    except ValueError as error:
        raise ConfigError(f"optimizer.{error}") from error
    if is_foreign(settings.name):
        return _make_foreign(settings, groups, lr=lr)
    return make_native(settings, groups, lr=lr)


def make_native(settings: OptimizerConfig, groups: Groups, *, lr: float) -> torch.optim.Optimizer:
    """Return one of OPTIMIZERS, with the settings and options that it takes."""
    stated = with_default_options("optimizer", settings.name, settings.options)
    if settings.momentum is not None:
        stated["momentum"] = settings.momentum
    if settings.name in WHOLE_MATRIX:
        # apart gives weights that are not matrices, or do not adapt, separate groups
        factor = stated.pop("vector_lr_factor", 1.0)
        groups = [part for group in groups for part in apart(group, vector_lr_factor=factor)]
    return NATIVE[settings.name](groups, lr=lr, **stated)


def _make_sgd(groups: Groups, *, lr: float, momentum: float, nesterov: bool) -> torch.optim.SGD:
    """Return torch's fused SGD, whose momentum starts from zero, not from the first gradient: the same update.

    An fp16 run's first step may overflow and be skipped: torch's fused kernel then leaves its momentum buffer allocated
    but unwritten, and the next step reads it.
    """
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=momentum, nesterov=nesterov, fused=True)
    if momentum > 0:
        for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
            optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


NATIVE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "lars": LARS,
    "lamb": LAMB,
    "sgd": _make_sgd,
    "adamw": partial(torch.optim.AdamW, fused=True),
    "lion": Lion,
    "muon": Muon,
    "shampoo": Shampoo,
}


def stated_settings(settings: OptimizerConfig) -> tuple[str, ...] | None:
    """List the group settings that a resumed run takes from its config, not from the checkpoint; None: all."""
    if not is_foreign(settings.name):
        return None
    return ("params", "names", "adapt", "lr", "lr_factor", "weight_decay", *(settings.options or {}))


def _make_foreign(settings: OptimizerConfig, groups: Groups, *, lr: float) -> torch.optim.Optimizer:
    try:
        make = find_optimizer(settings.name)
    except ValueError as error:
        raise ConfigError(f"optimizer.name={settings.name}: {error}") from error
    try:
        optimizer = make(groups, lr=lr, **(settings.options or {}))  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.options={settings.options} do not suit {settings.name}: {error}") from error
    except (ImportError, RuntimeError) as error:  # such as apex without its kernels
        raise ConfigError(f"optimizer.name={settings.name} does not work here: {error}") from error
    if settings.weight_decay != 0 and "weight_decay" not in optimizer.defaults:
        raise ConfigError(
            f"optimizer.weight_decay={settings.weight_decay} is not read by {settings.name}, which has none: set it to "
            "0"
        )
    if settings.ema_decay is not None and has_modes(optimizer):
        raise ConfigError(
            f"optimizer.ema_decay={settings.ema_decay} conflicts with optimizer.name={settings.name}, which averages "
            "the weights itself: set it and optimizer.ema_every_steps to null"
        )
    # such as Schedule-Free, which must be in training mode before its first step
    use_training_weights(optimizer)
    return optimizer
