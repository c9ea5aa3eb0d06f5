"""Optimizers and schedules of other packages, by import path."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.dotted import as_line, import_owner, is_of_library, own_callable
from bigbatch.trainer.config.sections import OptimizerConfig
from bigbatch.trainer.optim.two_weights import has_modes


def make_imported_optimizer(
    settings: OptimizerConfig, groups: list[dict[str, Any]], *, lr: float
) -> torch.optim.Optimizer:
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
    if has_modes(optimizer):
        optimizer.train()  # type: ignore[attr-defined]  # Schedule-Free must be in this mode before its first step
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


def make_imported_schedule(
    name: str, *, options: Mapping[str, Any], base_lr: float, warmup_steps: int, total_steps: int
) -> Callable[[int], float]:
    """Return the learning rate by step, from 0, of the schedule with that import path; tested at every step.

    Its function is called with the keyword arguments base_lr, warmup_steps, total_steps and options, and returns a
    function of the step. Steps after the last take its value. Raises: ConfigError.
    """
    key = f"schedule.name={name}"
    make = own_callable(name, key=key)
    if is_of_library(make, name=name):
        raise ConfigError(
            f"{key}: bigbatch's schedules have short names, and those of torch and timm step an optimizer: write a "
            "function in your own package, and name that"
        )
    try:
        schedule = make(base_lr=base_lr, warmup_steps=warmup_steps, total_steps=total_steps, **options)
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(
            f"{key} does not take base_lr, warmup_steps, total_steps and the options {dict(options)}: {as_line(error)}"
        ) from error
    if not callable(schedule):
        raise ConfigError(f"{key} returns a {type(schedule).__name__}: return a function of the step")
    for step in range(total_steps):
        try:
            rate = schedule(step)
        except Exception as error:  # foreign code may raise anything
            raise ConfigError(f"{key} fails at step {step}: {as_line(error)}") from error
        if not (isinstance(rate, int | float) and 0 <= rate < math.inf):
            raise ConfigError(f"{key} gives {rate!r} at step {step}: return a finite number of at least 0")
    return lambda step: float(schedule(min(step, total_steps - 1)))
