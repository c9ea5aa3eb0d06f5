"""Check each field of a checkpoint's state before anything uses it: a valid digest does not prove valid content."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import ConfigError, DamagedCheckpoint, shortened
from bigbatch.trainer.config.file import read_dumped
from bigbatch.trainer.config.optimizer import is_foreign
from bigbatch.trainer.config.schema import typed

_READ = ("model.name", "model.frozen", "optimizer.name", "optimizer.loss", "optimizer.precision", "data.num_classes")
"""Keys whose values are compared by more than equality."""
_NEEDED = {
    **{name: {"momentum_buffer"} for name in ("sgd", "lars", "muon", "shampoo")},
    "adamw": {"step", "exp_avg", "exp_avg_sq"},
}
"""Optimizer -> what it keeps of each weight, if it has a momentum; FusedOptimizer checks the rest."""
MAX_STEP = 1 << 53
WEIGHTS = ("config", "model", "average")


def require_fields(state: Mapping[str, Any], *, source: str, are_weights: bool = False) -> None:
    """Raise DamagedCheckpoint for a field that is missing, or that no run writes.

    are_weights: only its weights are used, so that other fields are not checked and may be missing.
    """
    if not are_weights and (missing := _FIELDS.keys() - state.keys()):
        raise DamagedCheckpoint(f"{source} is damaged: {min(missing)} is missing")
    for name in [name for name in WEIGHTS if name in state] if are_weights else _FIELDS:
        value, (is_valid, what) = state[name], _FIELDS[name]
        if not is_valid(value):
            found = shortened(value) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
            raise DamagedCheckpoint(f"{source} is damaged: {name} is {found}, not {what}")
    if not are_weights and (problem := next(_contradictions(state), None)):
        raise DamagedCheckpoint(f"{source} is damaged: {problem}")


def _is_count(value: object, most: int = MAX_STEP) -> bool:
    return type(value) is int and 0 <= value <= most


def _is_number(value: object) -> bool:
    return type(value) is int or (type(value) is float and math.isfinite(value))


def _is_dense(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized or value.is_meta)
    )


def _is_finite(value: object) -> bool:
    return isinstance(value, Tensor) and _is_dense(value) and not value.is_complex() and bool(value.isfinite().all())


def _is_config(value: object) -> bool:
    try:
        values = read_dumped(value) if isinstance(value, str) else {}
        return bool(values) and all(typed(key, values[key]) is not ... for key in _READ)
    except (ConfigError, ValueError, TypeError, AttributeError, KeyError):
        return False


def _is_mapping(value: object, is_key: Callable[[Any], bool], is_value: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(is_key(key) and is_value(each) for key, each in value.items())


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_evaluation(value: object) -> bool:
    return (
        _is_mapping(value, _is_text, lambda each: isinstance(each, float | int | Mapping))
        and isinstance(value, Mapping)
        and _is_count(value.get("step"))
        and isinstance(top1 := value.get("top1"), int | float)
        and 0 <= top1 <= 1
    )


def _is_optimizer(value: object) -> bool:
    if not isinstance(value, Mapping) or not isinstance(groups := value.get("param_groups"), list):
        return False
    if not all(_is_mapping(group, _is_text, lambda each: True) for group in groups):
        return False
    params = [group.get("params") for group in groups]
    names = [
        group.get("names", [""] * len(own)) for group, own in zip(groups, params, strict=True) if isinstance(own, list)
    ]
    if not all(isinstance(each, list) for each in (*names, *params)) or list(map(len, names)) != list(map(len, params)):
        return False
    numbers = [number for each in params for number in each]
    if not all(map(_is_count, numbers)) or numbers != list(range(len(numbers))):
        return False
    is_state = _is_mapping(
        value.get("state"),
        lambda key: type(key) is int and key in numbers,
        lambda kept: _is_mapping(kept, _is_text, _is_kept),
    )
    return is_state and all(_is_text(each) for own in names for each in own)


def _is_kept(value: object, depth: int = 3) -> bool:
    """Return whether it is None, a number, a finite tensor, or lists or mappings of these, which no own class keeps."""
    if depth and isinstance(value, list | Mapping):
        return all(_is_kept(each, depth - 1) for each in (value.values() if isinstance(value, Mapping) else value))
    return value is None or isinstance(value, bool) or _is_number(value) or _is_finite(value)


def _is_precision(value: object) -> bool:
    scale = value.get("scale", 1.0) if isinstance(value, Mapping) else None
    return (
        _is_mapping(value, _is_text, lambda each: _is_number(each) and each >= 0) and type(scale) is float and scale > 0
    )


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "step": (_is_count, "a number of steps"),
    "config": (_is_config, "the text of a config"),
    "model": (lambda value: _is_mapping(value, _is_text, _is_dense), "tensors by name"),
    "in_training": (lambda value: isinstance(value, list) and all(map(_is_finite, value)), "a list of finite tensors"),
    "optimizer": (_is_optimizer, "the state of an optimizer"),
    "precision": (_is_precision, "the state of a loss scale"),
    "average": (lambda value: _is_mapping(value, _is_text, _is_finite), "finite tensors by name"),
    "evaluations": (lambda value: isinstance(value, list) and all(map(_is_evaluation, value)), "a list of evaluations"),
    "gradient_order": (_is_text, "a text"),
    "sums": (lambda value: _is_mapping(value, _is_text, _is_text), "texts by name"),
    "samples": (lambda value: value is None or _is_text(value), "a digest"),
    "skipped": (
        lambda value: _is_mapping(
            value, lambda key: _is_text(key) and re.fullmatch(r"(train|val)/\d{1,18}", key) is not None, _is_text
        ),
        "images by split and number, with reasons",
    ),
}


def _contradictions(state: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is lost or impossible although each field alone is valid."""
    values, step = read_dumped(state["config"]), state["step"]
    if not ((samples := state.get("val_samples")) is None or _is_text(samples)):  # older ones have none
        yield "val_samples is not a digest"
    if not state["precision"] and values["optimizer.precision"] == "fp16":
        yield "the state of its loss scale is missing"
    every = values["optimizer.ema_every_steps"]
    if not state["average"] and values["optimizer.ema_decay"] is not None and step >= every:
        yield "the average of its weights is missing"
    names = sorted(name for group in state["optimizer"]["param_groups"] for name in group.get("names", ()))
    if names and sorted(state["gradient_order"].split("\n")) != names:
        yield "gradient_order does not list its trained weights"
    kept, name = state["optimizer"]["state"], values["optimizer.name"]
    empty = {weight for weight, tensor in state["model"].items() if not tensor.numel()}
    is_updated = step > state["precision"].get("overflow_steps", 0)
    # a foreign optimizer may keep nothing of some weights, and anything of others
    for group in [] if is_foreign(name) else state["optimizer"]["param_groups"]:
        has_momentum = _is_number(momentum := group.get("momentum")) and momentum > 0
        if not kept and not (is_updated and (has_momentum or "betas" in group)):
            continue
        needed = _NEEDED.get(name, set()) if has_momentum or name == "adamw" else set()
        every_entry = {entry for number in group["params"] for entry in kept.get(number, {})}
        for number, weight in zip(group["params"], group.get("names", group["params"]), strict=True):
            entries = {entry for entry, value in kept.get(number, {}).items() if value is not None}
            if weight not in empty and ((kept and not kept.get(number)) or needed - entries or every_entry - entries):
                yield f"the optimizer's state of {weight} is missing, or a part of it"
            count = kept.get(number, {}).get("step", 0)
            if isinstance(count, list | Mapping) or getattr(count, "shape", ()) != () or not 0 <= count <= step:
                yield f"the optimizer counts {shortened(count)} updates of {weight} in {step} steps"
