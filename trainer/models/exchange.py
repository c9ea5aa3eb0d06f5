"""Convert state_dicts of other libraries to bigbatch's models, and back, by names."""

import re
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from fnmatch import filter as matching
from typing import Any

import torch
from torch import Tensor, nn

from bigbatch.errors import CheckpointError

NESTS = ("state_dict", "model", "state")
"""Keys under which training scripts save the weights: "state_dict" in timm, "model" in torchvision, both in others."""
WRAPPERS = ("module", "_orig_mod")
"""Prefixes that DistributedDataParallel and torch.compile add to every name."""
AVERAGE = re.compile(r"(?<![a-z])(?<!exp_)(ema|swa|averaged?|avg|shadow)(?![a-z])", re.IGNORECASE)
"""Words in the keys and prefixes under which scripts save an average of the weights; Adam's exp_avg is of gradients."""
MAX_NESTS, MAX_PREFIXES = 8, 32
"""Most keys that lead to the weights, and most modules around the model in their names."""
COUNTER = ".num_batches_tracked"
"""Name of a buffer of batch norms that no model here reads, and that files from before 2018 lack."""
NUM_NAMED = 3
"""Most names of a kind that an error lists."""


def from_foreign(
    state: object,
    model: nn.Module,
    *,
    source: str,
    new_head: bool = False,
    say: Callable[[str], object] = lambda line: None,
) -> dict[str, Tensor]:
    """Return a complete state_dict for model from state; ResNets share names with torchvision and timm.

    new_head: the last layer keeps the model's own weights; those in state are ignored.
    source names the file in errors; say gets a line if an average is chosen.
    Raises: CheckpointError if state is not a state_dict, or another model's.
    """
    own, heads = model.state_dict(), heads_of(model) if new_head else []
    needed = {name for name in own if not name.endswith(COUNTER) and _owner(name) not in heads}
    tensors = _require_tensors(_find(state, needed, own, source=source, say=say), own, source=source)
    # the model's counters first, so that the file's replace them if it has any
    tensors = {name: tensor for name, tensor in own.items() if name.endswith(COUNTER)} | tensors
    tensors = {name: tensor for name, tensor in tensors.items() if _owner(name) not in heads}
    tensors |= {name: tensor for name, tensor in own.items() if _owner(name) in heads}
    _require_names(tensors, own, source=source)
    _require_shapes(tensors, own, heads=heads_of(model), source=source)
    return tensors


def partly_from_foreign(
    state: object, model: nn.Module, *, source: str, patterns: Sequence[str], say: Callable[[str], object]
) -> dict[str, Tensor]:
    """Return weights from state for names that match patterns, and model's own for the rest; say gets log lines.

    Raises: CheckpointError if a pattern matches nothing in the model, or its weights are missing or of another shape.
    """
    own = model.state_dict()
    named: dict[str, None] = {}
    for pattern in patterns:
        if not (found := matching(own, pattern)):
            raise CheckpointError(
                f"model.partial_weights: {pattern!r} matches nothing in this model; its weights are {next(iter(own))} "
                f"to {[*own][-1]}: correct it, or leave it out"
            )
        named.update(dict.fromkeys(found))
    needed = {name for name in named if not name.endswith(COUNTER)}
    tensors = _require_tensors(_find(state, needed, own, source=source, say=say), own, source=source)
    taken = [name for name in named if name in tensors or not name.endswith(COUNTER)]
    if missing := [name for name in taken if name not in tensors]:
        raise CheckpointError(
            f"{source} lacks {len(missing)} of the {len(taken)} tensors that model.partial_weights names "
            f"({_first(missing)}): list only tensors that it has"
        )
    if odd := [name for name in taken if own[name].shape != tensors[name].shape]:
        raise CheckpointError(
            f"{source}: {odd[0]}, which model.partial_weights names, has shape {list(tensors[odd[0]].shape)} there and "
            f"{list(own[odd[0]].shape)} here: leave it out"
        )
    fresh = [name for name in own if name not in taken]
    unused = [name for name in tensors if name not in taken]
    say(
        f"model.partial_weights: {len(taken)} of {len(own)} tensors are from {source}; {len(fresh)} are initialized"
        f"{_listed(fresh)}; {len(unused)} of the file's are not used{_listed(unused)}"
    )
    return own | {name: tensors[name] for name in taken}


def _listed(names: Sequence[str]) -> str:
    return f" ({_first(names)})" if names else ""


def heads_of(model: nn.Module) -> list[str]:
    """Return the names of the classifier layers, two in distilled models: timm's, or else the last layer."""
    layers = [_owner(name) for name, tensor in model.state_dict().items() if tensor.ndim >= 2]
    stated = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    return [name for name in ([stated] if isinstance(stated, str) else stated) if name in layers] or layers[-1:]


def names_head(model: nn.Module, patterns: Sequence[str]) -> bool:
    """Return whether a pattern matches a weight of the classifier layer."""
    own, heads = model.state_dict(), heads_of(model)
    return any(_owner(name) in heads for pattern in patterns for name in matching(own, pattern))


def _owner(name: str) -> str:
    return name.rpartition(".")[0].partition(".parametrizations.")[0]  # of torch.nn.utils.parametrize


def plain_tensors(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors in the form that other libraries save: on the CPU, contiguous, without shared memory."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in state.items()}


def _find(
    state: object, needed: Set[str], own: Mapping[str, Tensor], *, source: str, say: Callable[[str], object]
) -> object:
    """Return the state_dict in state that has most of the needed names of own, without a prefix of its names.

    It may be in a mapping at any depth. Of several, an average is preferred, as in our own checkpoints; then one
    without other keys and prefixes than NESTS and WRAPPERS; then the one with more shapes of own. If none has half of
    the names, returns the mapping with most tensors. Raises: CheckpointError if several are equally good.
    """
    mappings = list(_mappings(state))
    found: dict[str, tuple[tuple[int, ...], Mapping[Any, Any]]] = {}
    for keys, mapping in mappings:
        for prefix, count in _prefixes(mapping, needed).items():
            if 2 * count <= len(needed):
                continue
            tensors = mapping
            if prefix:
                names = [name for name in mapping if isinstance(name, str) and name.startswith(prefix)]
                tensors = {name.removeprefix(prefix): mapping[name] for name in names}
            wrappers = [*keys, *filter(None, prefix.split("."))]
            place = ".".join(wrappers)
            is_average = AVERAGE.search(place) is not None
            pairs = [(tensors.get(name), own[name]) for name in needed]
            num_fitting = sum(isinstance(a, Tensor) and not a.is_nested and a.shape == b.shape for a, b in pairs)
            found[place] = (count, is_average, {*wrappers} <= {*NESTS, *WRAPPERS}, num_fitting), tensors
    if not found:
        return max(reversed(mappings), key=lambda each: _num_tensors(each[1]), default=((), state))[1]
    best = max(rank for rank, _ in found.values())
    place, *others = (place for place, (rank, _) in found.items() if rank == best)
    if others:
        raise CheckpointError(
            f"{source} holds weights of this model several times ({_first([place, *others])}): save those that you "
            "mean, with torch.save(model.state_dict(), FILE)"
        )
    if AVERAGE.search(place):
        say(f"{source}: the average of the weights is read ({place})")
    return found[place][1]


def _mappings(state: object) -> Iterator[tuple[tuple[str, ...], Mapping[Any, Any]]]:
    """Yield the mappings in state, each once, with the keys that lead to them; those that they hold come later."""
    left: deque[tuple[tuple[str, ...], object]] = deque([((), state)])
    seen: set[int] = set()
    while left:
        keys, found = left.popleft()
        if isinstance(found, Mapping) and id(found) not in seen:
            seen.add(id(found))  # mappings in a file may contain each other
            yield keys, found
            nested = [((*keys, key), value) for key, value in found.items() if isinstance(key, str)]
            left.extend(nested if len(keys) < MAX_NESTS else ())


def _prefixes(mapping: Mapping[Any, Any], needed: Set[str]) -> Counter[str]:
    """Count, by prefix, the tensors whose names are a prefix and a needed name."""
    counts: Counter[str] = Counter()
    for name, value in mapping.items():
        if isinstance(name, str) and isinstance(value, Tensor):
            parts = name.split(".", MAX_PREFIXES)
            ends = (".".join(parts[start:]) for start in range(len(parts)))
            counts.update(name.removesuffix(end) for end in ends if end in needed)
    return counts


def _num_tensors(mapping: Mapping[Any, Any]) -> int:
    return sum(isinstance(value, Tensor) for value in mapping.values())


def holds_weights(state: object) -> bool:
    """Return whether state, or a mapping at any depth in it, holds tensors only."""
    return any(0 < len(each) == _num_tensors(each) for _, each in _mappings(state))


def _require_tensors(state: object, own: Mapping[str, Tensor], *, source: str) -> dict[str, Tensor]:
    remedy = "save one with torch.save(model.state_dict(), FILE)"
    if not isinstance(state, Mapping):
        raise CheckpointError(f"{source} holds a {type(state).__name__} and no state_dict: {remedy}")
    odd = [name for name, value in state.items() if not isinstance(name, str) or not isinstance(value, Tensor)]
    if odd or not state:
        what = f"{odd[0]!r} in it is of type {type(state[odd[0]]).__name__}" if odd else "it is empty"
        raise CheckpointError(f"{source} holds no state_dict, since {what}: {remedy}")
    if odd := [name for name, tensor in state.items() if not _is_plain(tensor, own.get(name))]:
        raise CheckpointError(
            f"{source}: {odd[0]} is not a dense tensor of real numbers of 16 bits or more: save it as used, such as "
            "by .to_dense() or .float()"
        )
    return dict(state)


def _is_plain(tensor: Tensor, own: Tensor | None) -> bool:
    """Return whether a tensor of a file is dense, and holds numbers of own's kind."""
    is_dense = tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_quantized)
    if own is not None and tensor.dtype == own.dtype:
        return is_dense
    # floats of 8 bits or less have a meaning only with a scale
    return is_dense and not tensor.is_complex() and (tensor.element_size() > 1 or not tensor.is_floating_point())


def _require_names(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], *, source: str) -> None:
    odd = {
        f"of {len(own)} tensors are missing": [name for name in own if name not in tensors],
        f"of {len(tensors)} tensors are foreign": [name for name in tensors if name not in own],
    }
    why = " and ".join(f"{len(names)} {what} ({_first(names)})" for what, names in odd.items() if names)
    if not why:
        return
    if {"features.0.bias", "classifier.6.weight"} <= tensors.keys() and "features.1.running_mean" not in tensors:
        why += "; torchvision's AlexNet has biases where alexnet_bn has batch norm, and gives it no start"
    raise CheckpointError(
        f"{source} is of another model: {why}. To start from a part of it, list what to take in model.partial_weights"
    )


def _first(names: Sequence[str]) -> str:
    return ", ".join([*names[:NUM_NAMED], *(["..."] if len(names) > NUM_NAMED else [])])


def _require_shapes(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], *, heads: list[str], source: str) -> None:
    odd = [name for name in own if own[name].shape != tensors[name].shape]
    if not odd:
        return
    classifier = [name for name in own if own[name].ndim >= 2 and _owner(name) in heads][-1]
    if _owner(odd[0]) in heads and own[classifier].shape[1:] == tensors[classifier].shape[1:]:
        there, here = len(tensors[classifier]), len(own[classifier])
        raise CheckpointError(
            f"{source}: {classifier} has {there} classes and data.num_classes is {here}: train with "
            f"--model.new_head true to give it a new last layer, or set data.num_classes to {there} for data of these "
            "classes"
        )
    shapes = [list(state[odd[0]].shape) for state in (tensors, own)]
    raise CheckpointError(
        f"{source} is of another model: {odd[0]} has shape {shapes[0]} there and {shapes[1]} here: set the keys of "
        "the model section as they were for these weights"
    )
