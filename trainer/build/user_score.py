"""Build the user's loss and metrics, tested on random logits before the first step, and weights of classes."""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.errors import ConfigError, or_nearest
from bigbatch.trainer.config.dotted import as_line, is_of_library, own_callable
from bigbatch.trainer.config.optimizer import BALANCED, CLASS_WEIGHTS, CROSS_ENTROPY, named_entries
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.step.score import Metric, PerImage, Score, cross_entropies

if TYPE_CHECKING:
    from bigbatch.trainer.build.input import Split

FUNCTION_MODULES = ("torch.nn.functional", "torchvision.ops")
"""Modules of torch and torchvision that define losses as functions."""
NUM_TEST_IMAGES = 4
"""Number of test images; even, because halves are tested too."""


def class_weights(config: Config, train: "Split", device: torch.device) -> Tensor | None:
    """Return the stated weights of the classes, scaled to a mean of 1 over the training images; None without weights.

    So their scale does not count, as with torch's weighted mean, which divides by their sum, and an image's loss does
    not depend on others: with the training set as one batch both are equal. Raises: ConfigError.
    """
    stated = (config.optimizer.loss_options or {}).get(CLASS_WEIGHTS)
    if stated is None:
        return None
    key, num_classes = f"optimizer.loss_options: {CLASS_WEIGHTS}", config.data.num_classes
    names = train.classes or tuple(map(str, range(num_classes)))
    counts_K = torch.from_numpy(train.class_counts(num_classes)).double()
    if stated == BALANCED:
        stated = (1 / counts_K).tolist()
    elif isinstance(stated, dict):
        stated = {str(name): number for name, number in stated.items()}  # YAML reads a class 7 as a number
        if unknown := [name for name in stated if name not in names]:
            raise ConfigError(f"{key}: {config.data.root} has no class {unknown[0]}{or_nearest(unknown[0], names)}")
        stated = [stated.get(name, 1.0) for name in names]
    weights_K = torch.tensor(stated, dtype=torch.float64)
    if not weights_K.isfinite().all():
        empty = names[int(weights_K.argmax())]
        raise ConfigError(f"{key}={BALANCED}: {empty} has no training image, and so no weight: give a weight by name")
    weights_K /= weights_K.max()  # their sum may be larger than a float
    mean = (weights_K * counts_K).sum() / counts_K.sum()
    if not mean > 0:
        raise ConfigError(f"{key} is 0 for all classes that have training images: give one of them a weight")
    return (weights_K / mean).float().to(device)


def make_user_score(config: Config, device: torch.device) -> Score:
    """Return loss and metrics of an evaluation, at least one of them the user's. Raises: ConfigError."""
    losses = cross_entropies if config.optimizer.loss == CROSS_ENTROPY else make_user_loss(config, device)
    metrics = {
        name: _user_metric(dotted, options, key=f"run.metrics: {name}={dotted}", config=config, device=device)
        for name, dotted, options in named_entries(config.run.metrics)
    }
    return Score(losses, metrics)


def make_user_loss(config: Config, device: torch.device) -> PerImage:
    """Return optimizer.loss, tested on random logits: (B) losses of images. Raises: ConfigError."""
    optimizer, augment = config.optimizer, config.augment
    key = f"optimizer.loss={optimizer.loss}"
    own = _make(optimizer.loss, optimizer.loss_options or {}, key=key, device=device)
    logits_BK, labels_B = _noise(config.data.num_classes, device)
    tried = [labels_B]
    if augment.mixup_alpha or augment.cutmix_alpha:
        tried.append(F.one_hot(labels_B, config.data.num_classes).float().lerp(logits_BK.softmax(1), 0.25))
    for targets in tried:
        losses_B = _try(own, logits_BK.requires_grad_(), targets, key=key)
        if losses_B.ndim != 1 or not losses_B.requires_grad:
            gives = "no gradient" if losses_B.ndim == 1 else f"numbers of shape {tuple(losses_B.shape)}"
            raise ConfigError(f"{key} gives {gives}: a loss gives one number for each image, with a gradient")
    return own


def _user_metric(dotted: str, options: Mapping[str, Any], *, key: str, config: Config, device: torch.device) -> Metric:
    own = _make(dotted, options, key=key, device=device)
    result = getattr(own, "result", None)
    with torch.no_grad():
        values = _try(own, *_noise(config.data.num_classes, device), key=key)
    if values.ndim > 2 or (values.ndim == 2 and result is None):
        raise ConfigError(
            f"{key} gives numbers of shape {tuple(values.shape)} for {NUM_TEST_IMAGES} images. Give one per image, to "
            "average, or several per image and a method result, which computes the metric from their sums"
        )
    result = None if result is None else partial(_try_result, result, key=key)
    metric = Metric(own, width=values[0].numel(), result=result, is_on_grid=config.run.reproducible)
    metric.figure(values.double().reshape(NUM_TEST_IMAGES, -1).sum(0).cpu(), count=NUM_TEST_IMAGES)
    return metric


def _try_result(result: Callable[[Tensor], Any], sums_M: Tensor, *, key: str) -> float:
    """Return result(sums_M); NaN if it divides numbers of Python by 0, as torch does. Raises: ConfigError."""
    try:
        return float(result(sums_M))
    except ZeroDivisionError:
        return math.nan
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(f"{key}: result fails on sums of shape {tuple(sums_M.shape)}: {as_line(error)}") from error


def _make(dotted: str, options: Mapping[str, Any], *, key: str, device: torch.device) -> PerImage:
    """Import dotted: a class is instantiated with options, a function gets them at each call. Raises: ConfigError."""
    found: Any = own_callable(dotted, key=key)
    if is_of_library(found, name=dotted) and not _is_library_score(found):
        raise ConfigError(
            f"{key}: from torch, torchvision, timm and Python only torch modules and functions of "
            f"{' and '.join(FUNCTION_MODULES)} are legal: call others in a function of your own package, and name that"
        )
    if is_of_library(found, name=dotted):  # torch's weight and pos_weight are tensors, and YAML has none
        lists = {name: value for name, value in options.items() if isinstance(value, list | tuple)}
        options = {**options, **{name: torch.tensor(value).float().to(device) for name, value in lists.items()}}
    if not isinstance(found, type):
        return partial(found, **options)
    if not any("__call__" in vars(base) for base in found.__mro__):
        raise ConfigError(f"{key}: its objects cannot be called with logits and labels")
    try:
        own = found(**options)
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(f"{key} does not take the options {dict(options)}: {as_line(error)}") from error
    if isinstance(own, nn.Module):
        if any(True for _ in own.parameters()):
            raise ConfigError(f"{key} has its own weights, which are not trained: move them into the model")
        own.to(device)
    return own


def _is_library_score(found: object) -> bool:
    """Return whether found is a torch module or is in FUNCTION_MODULES: others may load files or start processes."""
    if isinstance(found, type):
        return issubclass(found, nn.Module)
    home = f"{getattr(found, '__module__', None)}."
    return inspect.isfunction(found) and home.startswith(tuple(f"{each}." for each in FUNCTION_MODULES))


def _noise(num_classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return logits (4, K) and labels (4), drawn without touching torch's default generators."""
    logits_BK = torch.randn(NUM_TEST_IMAGES, num_classes, generator=torch.Generator().manual_seed(0))
    return logits_BK.to(device), (torch.arange(NUM_TEST_IMAGES) % num_classes).to(device)


def _try(own: PerImage, logits_BK: Tensor, targets: Tensor, *, key: str) -> Tensor:
    """Return the numbers of each image, which must not depend on the others. Raises: ConfigError."""
    shapes = f"logits of shape {tuple(logits_BK.shape)} and targets of shape {tuple(targets.shape)}"
    if targets.ndim == 2:
        shapes += ", as augment.mixup_alpha and augment.cutmix_alpha make them"
    try:
        with torch.random.fork_rng([logits_BK.device] if logits_BK.device.type == "cuda" else []):
            whole = own(logits_BK, targets)
            halves = [own(*half) for half in zip(logits_BK.chunk(2), targets.chunk(2), strict=True)]
    except Exception as error:  # foreign code may raise anything
        raise ConfigError(f"{key} fails on {shapes}: {as_line(error)}") from error
    if not isinstance(whole, Tensor) or not whole.ndim or len(whole) != len(logits_BK):
        given = f"shape {tuple(whole.shape)}" if isinstance(whole, Tensor) else f"type {type(whole).__name__}"
        raise ConfigError(
            f"{key} returns a value of {given} for {shapes}, not numbers for each image: leave out mean or sum, "
            "as losses of torch.nn do with the option reduction: none"
        )
    if not torch.allclose(whole.double(), torch.cat(halves).double(), rtol=1e-4, atol=1e-6, equal_nan=True):
        raise ConfigError(
            f"{key} gives an image other numbers in a batch with other images: its result must not depend on the "
            "division of a batch"
        )
    return whole
