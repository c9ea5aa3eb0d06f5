"""Build the optimizer of a config, over groups of the parameters to update."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.errors import ConfigError
from bigbatch.parts import load_named
from bigbatch.trainer.config.kinds import with_default_options
from bigbatch.trainer.config.optimizer import WHOLE_MATRIX, is_foreign
from bigbatch.trainer.config.sections import OptimizerConfig
from bigbatch.trainer.optim.param_groups import param_groups

Groups = list[dict[str, Any]]
NATIVE = {
    "lars": "bigbatch.trainer.optim.lars.LARS",
    "lamb": "bigbatch.trainer.optim.lamb.LAMB",
    "sgd": "bigbatch.trainer.optim.of_torch.make_sgd",
    "adamw": "bigbatch.trainer.optim.of_torch.make_adamw",
    "lion": "bigbatch.trainer.optim.lion.Lion",
    "muon": "bigbatch.trainer.optim.muon.Muon",
    "shampoo": "bigbatch.trainer.optim.shampoo.Shampoo",
}
"""Name of an optimizer -> import path of its class, or of a function that makes it."""


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
        from bigbatch.trainer.optim.imported import make_imported_optimizer

        return make_imported_optimizer(settings, groups, lr=lr)
    return make_native(settings, groups, lr=lr)


def make_native(settings: OptimizerConfig, groups: Groups, *, lr: float) -> torch.optim.Optimizer:
    """Return one of OPTIMIZERS, with the settings and options that it takes."""
    stated = with_default_options("optimizer", settings.name, settings.options)
    if settings.momentum is not None:
        stated["momentum"] = settings.momentum
    if settings.name in WHOLE_MATRIX:
        from bigbatch.trainer.optim.matrices import apart

        # apart gives weights that are not matrices, or do not adapt, separate groups
        factor = stated.pop("vector_lr_factor", 1.0)
        groups = [part for group in groups for part in apart(group, vector_lr_factor=factor)]
    optimizer: torch.optim.Optimizer = load_named(NATIVE, settings.name, key="optimizer.name")(groups, lr=lr, **stated)
    return optimizer


def stated_settings(settings: OptimizerConfig) -> tuple[str, ...] | None:
    """List the group settings that a resumed run takes from its config, not from the checkpoint; None: all."""
    if not is_foreign(settings.name):
        return None
    return ("params", "names", "adapt", "lr", "lr_factor", "weight_decay", *(settings.options or {}))
