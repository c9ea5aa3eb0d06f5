"""Optimizers of other packages, by import path."""

from typing import Any

import torch

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.dotted import import_owner
from bigbatch.trainer.config.sections import OptimizerConfig
from bigbatch.trainer.optim.foreign import has_modes, use_training_weights


def make_imported(settings: OptimizerConfig, groups: list[dict[str, Any]], *, lr: float) -> torch.optim.Optimizer:
    """Make the optimizer whose import path is settings.name. Raises: ConfigError."""
    try:
        make = _find(settings.name)
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


def _find(name: str) -> type[torch.optim.Optimizer]:
    """Import an optimizer class by its import path. Raises: ValueError if it is missing or no optimizer."""
    module, class_name = import_owner(name)
    found = getattr(module, class_name, None)
    if found is None:
        known = [key for key, value in vars(module).items() if _is_optimizer(value)]
        raise ValueError(f"{module.__name__} has no {class_name}; its optimizers are {', '.join(known) or 'none'}")
    if not _is_optimizer(found):
        raise ValueError(f"{name} is not a torch.optim.Optimizer")
    return found


def _is_optimizer(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, torch.optim.Optimizer)
