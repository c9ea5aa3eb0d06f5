"""Parameter groups: weights decay and adapt, bias and normalisation do not."""

from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

MAGNITUDES = {"_g": "_v", ".original0": ".original1"}
"""Ends of the names of weight_norm's magnitudes, of shape (out, 1, ...), and of its directions."""
LIKE_WEIGHT = {"momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "z"}
"""What optimizers keep of a weight in its shape."""
NORM_LAYERS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


def decays(model: nn.Module) -> dict[str, bool]:
    """Return whether weight decay applies, by parameter name; a shared parameter appears once, under its first name.

    False for parameters of normalisation layers (by module type, so names do not matter), for biases, torch's
    in_proj_bias and bias_ih_l0 included, for other vectors and scalars, such as timm's layer scales and the magnitudes
    of weight_norm, and for parameters that the model's no_weight_decay() lists, as timm's models do. Worth +1.3% top-1
    (Jia et al. 2018).
    """
    listed, has_decay, parameters = set[str](), {}, dict(model.named_parameters())
    for prefix, module in model.named_modules():
        if {*prefix.split(".")} <= {"", "module", "_orig_mod"}:  # in DistributedDataParallel and torch.compile
            names = getattr(module, "no_weight_decay", None) or ()
            listed |= {f"{prefix}.{name}".lstrip(".") for name in (names() if callable(names) else names)}
    for name, parameter in parameters.items():
        owner, _, leaf = name.rpartition(".")
        is_norm = isinstance(model.get_submodule(owner), NORM_LAYERS)
        is_magnitude = parameter.squeeze().dim() <= 1 and any(
            name.endswith(end) and name.removesuffix(end) + other in parameters for end, other in MAGNITUDES.items()
        )
        is_vector = parameter.dim() <= 1 or is_magnitude
        has_decay[name] = not (is_vector or is_norm or is_bias(leaf) or name in listed)
    return has_decay


def is_bias(name: str) -> bool:
    """Return whether a parameter of that name is a bias, such as bn1.bias, in_proj_bias and bias_ih_l0."""
    return "bias" in name.rpartition(".")[2]


def param_groups(
    model: nn.Module,
    *,
    weight_decay: float,
    exclude_bias_and_norm: bool = True,
    bias_lr_factor: float = 1.0,
    lr_factors: Mapping[str, float] | None = None,
    substitute: Mapping[str, Tensor] | None = None,
) -> list[dict[str, Any]]:
    """Return two groups for any torch optimizer: parameters that decay and adapt, and the others; none that is frozen.

    Without exclude_bias_and_norm the second group is empty. With another bias_lr_factor than 1, biases are a third
    group: it has the factor as lr_factor, for the code that sets the learning rate, and weight_decay / the factor.
    lr_factors: pattern of names -> factor; the first pattern that matches applies, or else a factor of 1.
    The groups are then split by factor, which multiplies lr_factor; weight_decay stays.
    substitute: parameter name -> tensor to optimize in its place (fp32 master weights).
    `names` holds the parameters' names, in order. bigbatch's optimizers read `adapt`; torch's ignore it.
    Raises: ValueError if substitute names no trainable parameter, a pattern applies to none, or a factor is no factor.
    """
    if not bias_lr_factor > 0:
        raise ValueError(f"bias_lr_factor must be positive, not {bias_lr_factor}")
    tensors: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
    if unknown := set(substitute or ()) - set(tensors):
        raise ValueError(f"substitute names no trainable parameter: {', '.join(sorted(unknown))}")
    tensors.update(substitute or {})
    has_decay = {n: decay or not exclude_bias_and_norm for n, decay in decays(model).items()}
    biases = {name for name in tensors if bias_lr_factor != 1 and is_bias(name)}

    def group(names: list[str], *, is_decaying: bool) -> dict[str, Any]:
        return {
            "params": [tensors[name] for name in names],
            "names": names,
            "weight_decay": weight_decay if is_decaying else 0.0,
            "adapt": is_decaying,
        }

    others = [name for name in tensors if name not in biases]
    groups = [group([n for n in others if has_decay[n] is decay], is_decaying=decay) for decay in (True, False)]
    if biases:
        last = group([name for name in tensors if name in biases], is_decaying=not exclude_bias_and_norm)
        groups.append(last | {"weight_decay": last["weight_decay"] / bias_lr_factor, "lr_factor": bias_lr_factor})
    if not lr_factors:
        return groups
    factors = _factors(tensors, lr_factors)
    return [part for group in groups for part in _divided(group, factors)]


def _factors(names: Iterable[str], lr_factors: Mapping[str, float]) -> dict[str, float]:
    """Return the factor of each name: the first matching pattern's. Raises: ValueError for an unused pattern."""
    deciding = {name: next((p for p in lr_factors if fnmatchcase(name, p)), None) for name in names}
    if unused := [pattern for pattern in lr_factors if pattern not in deciding.values()]:
        raise ValueError(
            f"lr_factors: pattern {unused[0]!r} applies to none of the trained parameters, {next(iter(deciding))} to "
            f"{[*deciding][-1]}. Correct it, or move it before the pattern that already matches its parameters"
        )
    return {name: 1.0 if pattern is None else lr_factors[pattern] for name, pattern in deciding.items()}


def _divided(group: dict[str, Any], factors: Mapping[str, float]) -> list[dict[str, Any]]:
    named = list(zip(group["names"], group["params"], strict=True))
    return [
        {
            **group,
            "params": [tensor for name, tensor in named if factors[name] == factor],
            "names": [name for name, _ in named if factors[name] == factor],
            "lr_factor": factor * group.get("lr_factor", 1.0),
        }
        for factor in dict.fromkeys(factors[name] for name, _ in named)
    ]


def load_optimizer_state(
    optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], *, stated: Collection[str] | None = None
) -> None:
    """Load the momentum of a state_dict; the settings stay the optimizer's own (load_state_dict takes the saved ones).

    stated: names of the settings to keep; None: all. Others count steps, such as Schedule-Free's k, and are loaded.
    Raises: ValueError if the parameters or the meaning of the momentum differ.
    """
    own = optimizer.state_dict()
    _require_same_names(own["param_groups"], saved["param_groups"])
    groups = []
    for ours, theirs in zip(own["param_groups"], saved["param_groups"], strict=True):
        if ours.get("momentum_form") != theirs.get("momentum_form"):
            here, there = ours.get("momentum_form"), theirs.get("momentum_form")
            raise ValueError(f"momentum_form is {there} in the checkpoint, {here} in the config")
        if ("betas" in ours) != ("betas" in theirs):
            raise ValueError(
                "one of checkpoint and config has a momentum, the other means of gradients and of their squares: set "
                "optimizer.name as in the checkpoint"
            )
        counted = {} if stated is None else {key: theirs[key] for key in theirs.keys() - set(stated)}
        kinds = {key: {type(value), type(ours.get(key, 0))} for key, value in counted.items()}
        if odd := [key for key, kind in kinds.items() if len(kind) > 1 and not kind <= {int, float, Tensor}]:
            raise ValueError(f"{min(odd)} in a group of the optimizer is not of its type")
        _require_shapes(ours, saved["state"] if stated is None else {}, optimizer)
        groups.append({**ours, **counted})
    # a missing momentum was 0; torch's fused kernels would read unwritten memory for a missing one
    optimizer.load_state_dict({**saved, "state": {**own["state"], **saved["state"]}, "param_groups": groups})


def _require_shapes(group: Mapping[str, Any], state: Mapping[int, Mapping[str, Any]], optimizer: Any) -> None:
    """Raise ValueError if a momentum has another shape than its weight: torch would repeat a single number."""
    weights = dict(enumerate(chain(*(each["params"] for each in optimizer.param_groups))))
    for number, name in zip(group["params"], group.get("names", group["params"]), strict=True):
        for entry in LIKE_WEIGHT & state.get(number, {}).keys():
            kept, shape = state[number][entry], getattr(weights[number], "whole_shape", weights[number].shape)
            if kept is not None and getattr(kept, "shape", None) != shape:
                raise ValueError(f"{entry} of {name} has another shape than {list(shape)}")


def _require_same_names(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Raise ValueError if groups differ: torch compares counts of parameters only, and would mix up momenta."""
    here, there = ([group.get("names", []) for group in groups] for groups in (ours, theirs))
    if here == there:
        return
    if only_one := set(chain(*here)) ^ set(chain(*there)):
        raise ValueError(f"{min(only_one)} is trained in only one of checkpoint and config: set model.frozen as it was")
    raise ValueError(
        "groups of checkpoint and config differ: set optimizer.bias_lr_factor and optimizer.lr_factors as they were"
    )
