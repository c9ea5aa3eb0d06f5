"""Digests of what forward and backward give for single microbatches, before a sum makes one of many."""

import difflib
import fnmatch
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bigbatch.errors import ConfigError
from bigbatch.trainer.step.replicas import digest

MODULUS = 1 << 64
MIX = 0x9E3779B97F4A7C15 - MODULUS
"""An odd number without a pattern, so that two numbers that are digested together do not make up for each other."""
ACTIVATIONS, BEFORE_SUM = "activations", "gradients before the sum"
MOST_NAMES = 12
"""Most names of layers that an error lists."""
Row = tuple[str, str, int, str]
"""Phase, name of the layer or the parameter, number of the microbatch in the step, digest."""


class MicrobatchDigests:
    """Digests the gradients of single microbatches, and what some layers give for them, from start() to take().

    There are hooks in between alone. A gradient is taken as backward hands it over: before it is added to those of
    other microbatches, and before any sum over ranks. A layer that is called several times in a forward has one digest
    of all its outputs; what backward computes again is not counted. Of those that kept names all numbers are kept, too.
    """

    def __init__(self, model: nn.Module, *, layers: Sequence[str], kept: Sequence[str] = ()) -> None:
        self._model, self._layers, self._kept = model, layers, kept
        self._hooks: list[RemovableHandle] = []
        self._found: dict[tuple[str, str, int], Tensor] = {}
        self._is_forward = False
        self.microbatch = 0
        """The number of the one that is next, or is being computed."""
        self.values: dict[str, dict[str, dict[int, list[Tensor]]]] = {}
        """What is kept since start(), on the host: by phase, name and microbatch, in the order of a layer's outputs."""

    def start(self) -> None:
        """Put hooks on."""
        model = self._model
        self.values = {}
        named = dict(model.named_modules())
        self._hooks = [
            p.register_hook(partial(self._take, BEFORE_SUM, name))
            for name, p in model.named_parameters()
            if p.requires_grad
        ]
        if self._layers:
            self._hooks += [
                named[name].register_forward_hook(partial(self._take_outputs, name)) for name in self._layers
            ]
            # backward may call layers, too, to compute activations again
            self._hooks += [model.register_forward_pre_hook(partial(self._enter, True))]
            self._hooks += [model.register_forward_hook(partial(self._enter, False))]

    def take(self) -> list[Row]:
        """Take the hooks off, and return what they found, in the order in which it was made. Waits for the device."""
        for hook in self._hooks:
            hook.remove()
        found, self._hooks, self._found = self._found, [], {}
        values = torch.stack(list(found.values())).tolist() if found else []
        return [(*place, word(value)) for place, value in zip(found, values, strict=True)]

    def _enter(self, is_forward: bool, *_: object) -> None:
        self._is_forward = is_forward

    def _take_outputs(self, name: str, module: nn.Module, inputs: object, outputs: object) -> None:
        if self._is_forward:
            for tensor in _tensors(outputs):
                self._take(ACTIVATIONS, name, tensor)

    def _take(self, phase: str, name: str, tensor: Tensor) -> None:
        place = (phase, name, self.microbatch)
        # by rows and columns, whatever order the memory has
        found = digest([tensor.contiguous()])[0]
        former = self._found.get(place)
        self._found[place] = found if former is None else former * MIX + found
        if name in self._kept:
            of_name = self.values.setdefault(phase, {}).setdefault(name, {})
            of_name.setdefault(self.microbatch, []).append(on_host(tensor))


def on_host(tensor: Tensor) -> Tensor:
    """Return a copy that nothing else writes. Waits for the device."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


def _tensors(outputs: Any) -> Iterator[Tensor]:
    if isinstance(outputs, Tensor):
        yield outputs
    elif isinstance(outputs, dict):
        yield from _tensors(list(outputs.values()))
    elif isinstance(outputs, list | tuple):
        for each in outputs:
            yield from _tensors(each)


def word(value: int) -> str:
    """Write a digest in 16 letters."""
    return f"{value % MODULUS:016x}"


def chosen_layers(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """List the layers that a pattern names, in the model's order. Raises: ConfigError for one that names none."""
    names = [name for name, _ in model.named_modules() if name]
    return _chosen(names, patterns, key="run.digest_layers", what="layer of the model")


def chosen_values(model: nn.Module, layers: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """List those of these layers, and the parameters, that a pattern names. Raises: ConfigError as chosen_layers."""
    names = [*layers, *(name for name, p in model.named_parameters() if p.requires_grad)]
    return _chosen(names, patterns, key="run.digest_values", what="parameter, or layer of run.digest_layers,")


def _chosen(names: Sequence[str], patterns: Sequence[str], *, key: str, what: str) -> list[str]:
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3)
            others = [name for name in names if name not in near]
            listed = [*near, *others][:MOST_NAMES]
            more = f" and {len(names) - len(listed)} more" if len(names) > len(listed) else ""
            raise ConfigError(f"{key}: no {what} is named {pattern}: there are {', '.join(listed)}{more}")
    return [name for name in names if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
