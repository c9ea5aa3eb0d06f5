"""Freezing of weights and of batch norm's running statistics, by patterns of names."""

from collections.abc import Sequence
from fnmatch import filter as matching

from torch import nn

from bigbatch.errors import ConfigError
from bigbatch.trainer.models.norm import GhostBatchNorm2d


def freeze_(model: nn.Module, patterns: Sequence[str]) -> None:
    """Disable gradients of weights that match patterns, and fix running statistics of norms that match them.

    Such a norm normalises by its running statistics in training, too: those of new images would change a part that must
    not change (the same in Keras, timm's freeze and Detectron2's FrozenBatchNorm).
    Raises: ConfigError for a pattern that matches nothing, and if nothing is left to train.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names = [*parameters, *(name for name, _ in model.named_buffers(remove_duplicate=False))]
    frozen: set[str] = set()
    for pattern in patterns:
        if not (found := matching(names, pattern)):
            raise ConfigError(
                f"model.frozen: {pattern!r} matches nothing in this model; its weights are {names[0]} to "
                f"{[*parameters][-1]}: correct it, or leave it out"
            )
        frozen.update(found)
    for name in frozen & parameters.keys():
        parameters[name].requires_grad_(False)
    for name, module in model.named_modules():
        if isinstance(module, GhostBatchNorm2d) and f"{name}.running_mean" in frozen:
            module.is_frozen = True
            module.eval()
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"model.frozen={list(patterns)} leaves nothing to train: freeze less")
