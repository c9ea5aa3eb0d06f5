"""From a config to its optimizer, over groups of the parameters to update."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.optimizer import is_foreign
from bigbatch.trainer.config.sections import OptimizerConfig
from bigbatch.trainer.optim.foreign import find_optimizer, has_modes, start_training
from bigbatch.trainer.optim.lamb import LAMB
from bigbatch.trainer.optim.lars import LARS
from bigbatch.trainer.optim.param_groups import param_groups

Groups = list[dict[str, Any]]


def make_optimizer(
    settings: OptimizerConfig, model: nn.Module, masters: Mapping[str, Tensor], *, lr: float
) -> torch.optim.Optimizer:
    """The optimizer of a config over the masters of a model's parameters. Raises: ConfigError."""
    groups = param_groups(
        model,
        weight_decay=settings.weight_decay,
        exclude_bias_and_norm=settings.exclude_bias_and_norm,
        bias_lr_factor=settings.bias_lr_factor,
        substitute=masters,
    )
    if is_foreign(settings.name):
        return _make_foreign(settings, groups, lr=lr)
    return MAKERS[settings.name](settings, groups, lr)


def stated_settings(settings: OptimizerConfig) -> tuple[str, ...] | None:
    """Which settings of groups a resumed run takes from its config, not from the checkpoint; None for all of them."""
    if not is_foreign(settings.name):
        return None
    return ("params", "names", "adapt", "lr", "lr_factor", "weight_decay", *(settings.options or {}))


def _make_lars(settings: OptimizerConfig, groups: Groups, lr: float) -> torch.optim.Optimizer:
    assert settings.momentum is not None
    assert settings.nesterov is not None
    assert settings.trust_coefficient is not None
    assert settings.eps is not None
    assert settings.momentum_form is not None
    return LARS(
        groups,
        lr=lr,
        momentum=settings.momentum,
        nesterov=settings.nesterov,
        trust_coefficient=settings.trust_coefficient,
        eps=settings.eps,
        momentum_form=settings.momentum_form,
    )


def _make_lamb(settings: OptimizerConfig, groups: Groups, lr: float) -> torch.optim.Optimizer:
    assert settings.betas is not None
    assert settings.eps is not None
    return LAMB(groups, lr=lr, betas=settings.betas, eps=settings.eps)


def _make_sgd(settings: OptimizerConfig, groups: Groups, lr: float) -> torch.optim.Optimizer:
    """With a momentum that starts from zero, not from its first gradient, which is the same update.

    An fp16 run's first step may overflow and be skipped: torch's fused kernel then leaves a momentum that was
    allocated for it and never written, and the next step takes that for one.
    """
    assert settings.momentum is not None
    assert settings.nesterov is not None
    optimizer = torch.optim.SGD(groups, lr=lr, momentum=settings.momentum, nesterov=settings.nesterov, fused=True)
    if settings.momentum > 0:
        for weight in (weight for group in optimizer.param_groups for weight in group["params"]):
            optimizer.state[weight]["momentum_buffer"] = torch.zeros_like(weight)
    return optimizer


def _make_adamw(settings: OptimizerConfig, groups: Groups, lr: float) -> torch.optim.Optimizer:
    assert settings.betas is not None
    assert settings.eps is not None
    return torch.optim.AdamW(groups, lr=lr, betas=settings.betas, eps=settings.eps, fused=True)


MAKERS = {"lars": _make_lars, "lamb": _make_lamb, "sgd": _make_sgd, "adamw": _make_adamw}


def _make_foreign(settings: OptimizerConfig, groups: Groups, *, lr: float) -> torch.optim.Optimizer:
    try:
        make = find_optimizer(settings.name)
    except ValueError as error:
        raise ConfigError(f"optimizer.name={settings.name}: {error}") from error
    try:
        optimizer = make(groups, lr=lr, **(settings.options or {}))  # type: ignore[call-arg]
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optimizer.options={settings.options} do not suit {settings.name}: {error}") from error
    if settings.weight_decay != 0 and "weight_decay" not in optimizer.defaults:
        raise ConfigError(
            f"optimizer.weight_decay={settings.weight_decay} is not read by {settings.name}, which has none: set it to "
            "0"
        )
    if settings.ema_decay is not None and has_modes(optimizer):
        raise ConfigError(
            f"optimizer.ema_decay={settings.ema_decay} does not go with optimizer.name={settings.name}, which averages "
            "the weights itself: set it and optimizer.ema_every_steps to null"
        )
    start_training(optimizer)
    return optimizer
