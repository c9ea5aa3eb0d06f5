"""Initialization of convolutions and linear layers by name, in place of a model's own."""

import math

from torch import nn
from torch.nn.init import _calculate_fan_in_and_fan_out as fans_of

from bigbatch.errors import ConfigError

LAYERS = (nn.Conv2d, nn.Linear)


def initialize_(model: nn.Module, name: str | None, *, linear_std: float | None) -> None:
    """Draw the weights from normal distributions around 0, and set the biases of the same layers to 0, in place.

    name: fan_in or fan_out for a standard deviation of sqrt(2 / fan) (He et al. 2015, arXiv 1502.01852); xavier for
    sqrt(2 / (fan in + fan out)) (Glorot and Bengio 2010); None leaves the weights. linear_std: the standard deviation
    of linear layers instead; None: that of name. Norms and frozen weights stay.
    Raises: ConfigError for a model without such layers, or with one that computes its weight from others.
    """
    chosen = [
        (prefix, layer, std)
        for prefix, layer in model.named_modules()
        if isinstance(layer, LAYERS) and (std := _std(layer, name, linear_std=linear_std)) is not None
    ]
    if (name or linear_std) and not chosen:
        raise ConfigError("model.init and model.linear_std name layers that this model does not have: set both to null")
    for prefix, layer, std in chosen:
        if not has_own_weights(layer):
            raise ConfigError(
                f"model.init and model.linear_std cannot set weights that {prefix} computes from others, as "
                "weight_norm and pruning do: set both to null"
            )
        nn.init.normal_(layer.weight, std=std)
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


def has_own_weights(layer: nn.Module) -> bool:
    """Return whether weight and bias are a layer's own, and not computed from others, as by weight_norm and pruning."""
    return all(name in layer.state_dict() for name in ("weight", "bias") if getattr(layer, name) is not None)


def _std(layer: nn.Conv2d | nn.Linear, name: str | None, *, linear_std: float | None) -> float | None:
    """Return the standard deviation of a layer's initial weights; None if they stay."""
    if linear_std is not None and isinstance(layer, nn.Linear):
        std = linear_std
    elif name is not None:
        fan_in, fan_out = fans_of(layer.weight)
        std = math.sqrt(2 / {"fan_in": fan_in, "fan_out": fan_out, "xavier": fan_in + fan_out}[name])
    else:
        return None
    return std if layer.weight.requires_grad or not has_own_weights(layer) else None
