"""The parameters that a reducer sums, with checks that refuse changes after which the ranks' weights would diverge."""

from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bigbatch.comm.backends.base import dtype_name
from bigbatch.errors import CommError

FIELDS = ("requires_grad", "dtype", "shape", "device")
"""Attributes that must not change after the reducer was made, in the order of _kind()."""
REMEDY = (
    "after a change of what is trained, close() the GradientReducer or DistributedOptimizer and make a new one, on all "
    "ranks alike"
)

_watched: "WeakSet[TrainedSet]" = WeakSet()
"""All watched sets: one optimizer may update the parameters of several."""
_hooks: list[Callable[[], object]] = []
"""What removes each hook of all optimizers and modules; empty while no set is watched."""


def as_pairs(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """Return (name, parameter) pairs as a list. Raises: TypeError for a model, or for parameters without names."""
    pairs = [*named_parameters] if isinstance(named_parameters, Iterable) else [named_parameters]
    for pair in pairs:
        is_pair = isinstance(pair, tuple) and len(pair) == 2
        if not (is_pair and isinstance(pair[0], str) and isinstance(pair[1], Tensor)):
            raise TypeError(
                "named_parameters must be pairs of a name and a parameter, such as model.named_parameters(), not "
                f"{type(pair).__name__}"
            )
    return pairs


class TrainedSet:
    """The parameters that a reducer sums, by name, and the frozen ones that it was given with them.

    Raises: TypeError without names; ValueError if two parameters have one name, one parameter has two names, is not on
    the ranks' device, has a dtype that is not summed, or belongs to another watched set, or if there is none to sum.
    """

    def __init__(
        self, named: Iterable[tuple[str, nn.Parameter]], *, device: torch.device, dtypes: Sequence[torch.dtype]
    ) -> None:
        given: dict[str, nn.Parameter] = {}
        for name, p in as_pairs(named):
            if given.setdefault(name, p) is not p:
                raise ValueError(f"two parameters are named {name!r}; give the names of each model a prefix")
        self.parameters = {name: p for name, p in given.items() if p.requires_grad}
        if not self.parameters:
            raise ValueError("there is no parameter to reduce: every one is frozen, or the iterator was used up")
        for name, p in self.parameters.items():
            if p.device != device:
                raise ValueError(
                    f"parameter {name} is on {p.device}, but ranks communicate on {device}: call "
                    "model.to(communicator.device) before making the reducer"
                )
            if p.dtype not in dtypes:
                names = ", ".join(map(dtype_name, dtypes))
                raise ValueError(f"parameter {name} is {p.dtype}; this backend, or grid=, sums only {names}: cast it")
        self._names = {id(p): name for name, p in self.parameters.items()}
        if twice := next((name for name, p in self.parameters.items() if self._names[id(p)] != name), None):
            first = self._names[id(self.parameters[twice])]
            raise ValueError(f"{twice} and {first} are one parameter: give it once, as model.named_parameters() does")
        for other in tuple(_watched):
            if shared := self._names.keys() & other._names.keys():
                raise ValueError(
                    f"parameter {self._names[shared.pop()]} belongs to another GradientReducer or "
                    "DistributedOptimizer: close() that one first"
                )
        self.has_unsummed = False
        """Whether backward has given gradients that the reducer has not summed; optimizers then refuse a step."""
        self._replaced: set[str] = set()
        self._kinds = {name: _kind(p) for name, p in self.parameters.items()}
        self.frozen = {name: p for name, p in given.items() if not p.requires_grad}
        _drop_gradients_of_frozen(given.values())

    def watch(self) -> None:
        """Until close(), record replaced parameters, and refuse optimizers that also update parameters not summed."""
        if not _hooks:
            _hooks.extend(_watch_torch())
        _watched.add(self)

    def require_unchanged(self, names: Iterable[str] | None = None) -> None:
        """Check attributes of all parameters, or of those named, for changes. No collective, no host sync.

        Raises: CommError naming a parameter that was frozen, unfrozen, cast, moved or resized since.
        """
        kinds = self._kinds
        changed = [name for name in names or kinds if _kind(self.parameters[name]) != kinds[name]]
        changed += [name for name, p in self.frozen.items() if p.requires_grad]
        if changed:
            raise CommError(f"{self._describe(changed)}: {REMEDY}")

    def _describe(self, changed: Sequence[str]) -> str:
        name = changed[0]
        if name in self.frozen:
            what = "requires_grad=True, which was False"
        else:
            pairs = zip(FIELDS, _kind(self.parameters[name]), self._kinds[name], strict=True)
            what = ", ".join(f"{field}={now}, which was {before}" for field, now, before in pairs if now != before)
        return f"parameter {name} has {what} when its GradientReducer was made{_more(changed)}"

    def require_in_model(self, unreached: Iterable[str]) -> None:
        """Raise CommError for a parameter that a module has replaced and backward did not reach (unreached)."""
        gone = sorted(self._replaced.intersection(unreached))
        if gone:
            raise CommError(
                f"parameter {gone[0]} was replaced in its module, and backward did not reach it{_more(gone)}: {REMEDY}"
            )

    def close(self) -> None:
        """Stop watching, and set the gradients of parameters frozen since to None."""
        _watched.discard(self)
        _drop_gradients_of_frozen(self.parameters.values())
        while _hooks and not _watched:
            _hooks.pop()()


def _watch_torch() -> list[Callable[[], object]]:
    """Hook into all optimizers and modules; return what removes each hook."""
    unscale_ = torch.amp.GradScaler.unscale_

    @wraps(unscale_)
    def unscale_summed_(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        # torch counts no version for this change, so the reducer could not notice it later
        _require_summed(optimizer, (), {})
        unscale_(scaler, optimizer)

    def restore() -> None:
        if torch.amp.GradScaler.unscale_ is unscale_summed_:
            torch.amp.GradScaler.unscale_ = unscale_  # type: ignore[method-assign]

    torch.amp.GradScaler.unscale_ = unscale_summed_  # type: ignore[method-assign, assignment]
    handles = (
        register_optimizer_step_pre_hook(_require_summed),
        register_optimizer_step_post_hook(_require_summed),  # of backward in a closure
        register_module_module_registration_hook(_note_replaced),
        register_module_parameter_registration_hook(_note_replaced),
    )
    return [restore, *(handle.remove for handle in handles)]


def _note_replaced(module: nn.Module, name: str, new: nn.Module | nn.Parameter | None) -> None:
    """Record parameters that a module no longer holds, until a module holds them again; others may still use them."""
    if _watched:
        lost, held = _held_by(module._modules.get(name, module._parameters.get(name))), _held_by(new)
        for each in tuple(_watched):
            each._replaced |= {each._names[key] for key in lost & each._names.keys()}
            each._replaced -= {each._names[key] for key in held & each._names.keys()}


def _held_by(thing: nn.Module | nn.Parameter | None) -> set[int]:
    return {id(p) for p in (thing.parameters() if isinstance(thing, nn.Module) else (thing,)) if p is not None}


def _require_summed(optimizer: torch.optim.Optimizer, args: object, options: object) -> None:
    """Refuse a step that would make ranks differ: by gradients that were not summed, or also of other parameters.

    Not checked: an optimizer that does not update all summed half-precision parameters, because it has master weights,
    which cannot be distinguished from other parameters. No host sync.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()  # else the answer of the first step would be compiled in
    updated = {id(p): p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
    sets = [each for each in tuple(_watched) if not each._names.keys().isdisjoint(updated)]
    if any(each.has_unsummed for each in sets):
        require_summed(updated.values(), by=type(optimizer).__name__)
    summed = [p for each in sets for p in each.parameters.values()]
    alone = updated.keys() - set(map(id, summed))
    if summed and alone and not any(p.dtype.itemsize < 4 and id(p) not in updated for p in summed):
        raise _updates_alone(optimizer, [p for key, p in updated.items() if key in alone])


def _updates_alone(optimizer: torch.optim.Optimizer, alone: Sequence[Tensor]) -> CommError:
    """Return the error for an optimizer that updates summed parameters and also these."""
    return CommError(
        f"{type(optimizer).__name__} updates a parameter of shape {tuple(alone[0].shape)} that no GradientReducer sums"
        f"{_more(alone)}, in addition to others that are summed: {REMEDY}; parameters that each rank trains "
        "separately need a separate optimizer"
    )


def require_summed(parameters: Iterable[Tensor], *, by: str) -> None:
    """Raise CommError if backward has given one of these parameters a gradient that its reducer has not summed."""
    unsummed = {key for each in tuple(_watched) if each.has_unsummed for key in each._names}
    if not unsummed.isdisjoint(map(id, parameters)):
        raise CommError(
            f"{by} uses gradients that are not summed over the ranks: call wait() or synchronize() after backward, "
            "also in a closure, before unscale_(), step() and update_()"
        )


def _drop_gradients_of_frozen(parameters: Iterable[nn.Parameter]) -> None:
    """Set their gradients to None: optimizers skip them. With zeros, momentum and weight decay would change weights."""
    for parameter in parameters:
        if not parameter.requires_grad:
            parameter.grad = None


def _more(changed: Sequence[object]) -> str:
    return f" (and {len(changed) - 1} more)" if changed[1:] else ""


def _kind(parameter: nn.Parameter) -> tuple[object, ...]:
    return parameter.requires_grad, parameter.dtype, parameter.shape, parameter.device
