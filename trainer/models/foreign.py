"""Models of other packages: torchvision's and timm's by name, any other by its import path."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.parameter import is_lazy

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.checks import LIBRARIES
from bigbatch.trainer.config.dotted import as_line, import_owner, is_of_library
from bigbatch.trainer.models.initialization import has_own_weights
from bigbatch.trainer.models.libraries import is_library_builder, library_model
from bigbatch.trainer.models.norm import NormFactory


def make_foreign(name: str, *, num_classes: int, norm: NormFactory, options: Mapping[str, Any]) -> nn.Module:
    """Return the model of torchvision:NAME, timm:NAME or an import path, with norm's layers as batch norms.

    Its class, or a function that makes it, is called with num_classes and options. Raises: ConfigError.
    """
    try:
        make = library_model(name) if name.startswith(LIBRARIES) else _find(name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"model.name={name}: {error}") from error
    try:
        model = make(num_classes=num_classes, **options)
    except SystemExit as error:
        raise ConfigError(f"model.name={name} ends Python in its constructor") from error
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"model.name={name} does not take num_classes={num_classes} with model.options={dict(options)}: {error}"
        ) from error
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(f"model.name={name} fails in its constructor: {as_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model.name={name} makes a {type(model).__name__} and no torch.nn.Module")
    try:
        require_tensors(model)
        take_norms_(model, norm)
    except ValueError as error:
        raise ConfigError(f"model.name={name}: {error}") from error
    for parameter in model.parameters():
        if parameter.dtype in (torch.float16, torch.bfloat16):  # optimizer.precision states what they are rounded to
            parameter.data = parameter.data.float()
    return model


def require_tensors(model: nn.Module) -> None:
    """Raise ValueError if the model's state_dict holds anything but dense tensors with values, as checkpoints do."""
    if lazy := [each for each, parameter in model.named_parameters() if is_lazy(parameter)]:
        raise ValueError(f"{lazy[0]} has no size yet: call the model once in its constructor")
    trained = {name for name, each in model.named_parameters(remove_duplicate=False) if each.requires_grad}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} in its state_dict is of type {type(value).__name__}: keep tensors only there")
        is_empty = value.is_meta and not torch.empty(0).is_meta  # the caller may ask for a model without values
        if is_empty or value.is_quantized or value.layout is not torch.strided:
            kind = "has no values, on the meta device" if is_empty else "is quantized or sparse"
            raise ValueError(f"{name} {kind}: make it a dense tensor on the CPU in the constructor")
        # empty_like keeps strides of dense tensors only; no optimizer updates others, and none can be loaded into
        has_gaps = name in trained and torch.empty_like(value, device="meta").stride() != value.stride()
        if has_gaps or 0 in value.stride():
            raise ValueError(f"{name} does not fill its memory, as a slice or expand() makes it: call .clone() on that")


def _find(name: str) -> Callable[..., Any]:
    """Return the object of that import path. Raises: ValueError."""
    module, own_name = import_owner(name)
    found = getattr(module, own_name, None)
    if found is None:
        known = [key for key, value in vars(module).items() if isinstance(value, type) and issubclass(value, nn.Module)]
        raise ValueError(f"{module.__name__} has no {own_name}; its modules are {', '.join(known) or 'none'}")
    if isinstance(found, type) and not issubclass(found, nn.Module):
        raise ValueError(f"it makes a {found.__name__} and no torch.nn.Module")
    if not callable(found):
        raise ValueError("it is neither a class nor a function that makes a torch.nn.Module")
    if not isinstance(found, type) and is_of_library(found, name=name) and not is_library_builder(found):
        raise ValueError(
            "it is neither a torch.nn.Module nor a classifier of torchvision or timm, such as "
            "torchvision.models.resnet18: call it in a function of an own package, and name that"
        )
    return found


def take_norms_(model: nn.Module, norm: NormFactory) -> None:
    """Replace each torch.nn.BatchNorm2d by norm's layers, in place; names, weights, eps and momentum stay.

    timm's BatchNormAct2d, one with an activation, keeps that as well.
    Raises: ValueError for another layer with running statistics, or with statistics over the batch: its update would
    depend on how a step is divided.
    """
    found = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, _BatchNorm) or (isinstance(module, _NormBase) and module.track_running_stats)
    }
    momenta = {module.momentum for module in found.values()}
    for name, module in found.items():
        is_known = type(module) is nn.BatchNorm2d or _has_activation(module)
        is_plain = is_known and module.affine and module.track_running_stats and has_own_weights(module)
        if not is_plain or None in momenta or len(momenta) > 1:
            raise ValueError(
                f"{name} is a {type(module).__name__}({module.extra_repr()}). Ghost batch norm takes the place of "
                "torch.nn.BatchNorm2d with weights, running statistics, and the same momentum in all: choose a model "
                "with such norms, or without batch norm"
            )
    taken = {module: _like(module, norm) for module in found.values()}
    for name, module in found.items():
        model.set_submodule(name, taken[module])


def _like(old: _NormBase, norm: NormFactory) -> nn.Module:
    new = norm(old.num_features)
    assert isinstance(new, nn.BatchNorm2d)
    new.load_state_dict(old.state_dict())
    # the same parameters, since they may be shared or frozen
    new.weight, new.bias = old.weight, old.bias
    new.eps, new.momentum = old.eps, old.momentum
    if _has_activation(old):
        new.drop, new.act = old.drop, old.act
        new.register_forward_hook(_activate)
    return new


def _has_activation(norm: nn.Module) -> bool:
    """Return whether the norm is timm's BatchNormAct2d, without importing timm."""
    return type(norm).__name__ == "BatchNormAct2d" and type(norm).__module__.startswith("timm.")


def _activate(norm: nn.Module, _inputs: object, normalized_BCHW: Tensor) -> Tensor:
    activated_BCHW: Tensor = norm.get_submodule("act")(norm.get_submodule("drop")(normalized_BCHW))
    return activated_BCHW


def require_logits_(model: nn.Module, *, name: str, num_classes: int) -> None:
    """Add a check to the first model(...): raise ConfigError unless it returns logits (B, num_classes)."""

    def check(_model: nn.Module, inputs: tuple[Any, ...], logits: object) -> None:
        first.remove()
        wanted = (len(inputs[0]), num_classes)
        if not isinstance(logits, Tensor) or logits.shape != wanted or not logits.is_floating_point():
            given = f"type {type(logits).__name__}"
            if isinstance(logits, Tensor):
                given = f"shape {tuple(logits.shape)} and dtype {str(logits.dtype).removeprefix('torch.')}"
            raise ConfigError(
                f"model.name={name} returns a value of {given} for {wanted[0]} images, and not one tensor of floats of "
                f"shape {wanted}, a logit for each of data.num_classes: set model.options so that it does"
            )

    first = model.register_forward_hook(check)
