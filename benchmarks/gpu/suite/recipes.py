"""The step of each packaged ImageNet recipe, beside the same step with one ghost batch of 256 images."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import cache
from typing import Any

import torch

from benchmarks.gpu.suite import kernels
from benchmarks.gpu.suite.context import TOO_LONG, Context, Found
from benchmarks.gpu.suite.job import CONFIG, Contestant, contestant, in_precision, rates_in_turn
from benchmarks.record import ratios
from bigbatch.trainer.build.compute_mode import choose_mode, describe_mode
from bigbatch.trainer.config.file import load_config, packaged_configs
from bigbatch.trainer.config.schema import Config

FOLDER = "imagenet/"
ONE_GHOST, OWN = "one ghost batch", "its own step"
RATIO = f"{OWN} / {ONE_GHOST}"
ONE_GHOST_IMAGES = 256
SHRUNK, MOST_GHOSTS = 128, 2
"""Divisor of ghost batches at the small size, which have at least two images; most of them in a microbatch there."""
SMALL_IMAGE_SIZES = {"alexnet_bn": 64}
"""Model -> image size at the small size, if the size's own is too small for it."""


@cache
def recipes() -> dict[str, tuple[str, ...]]:
    """Return name of a part -> the recipes that have this step; the first one is measured."""
    found: dict[object, list[str]] = {}
    names = sorted((each for each in packaged_configs() if each.startswith(FOLDER)), key=lambda each: each != CONFIG)
    for name in names:
        found.setdefault(_step_of(load_config(["--config", name])), []).append(name)
    return {each[0].removeprefix(FOLDER): tuple(each) for each in found.values()}


def _step_of(config: Config) -> tuple[object, ...]:
    """Return what distinguishes the kernels of two recipes' steps."""
    data, batch, optimizer = config.data, config.batch, config.optimizer
    return (
        *(repr(config.model), data.train_sizes[0] if data.train_sizes else data.image_size),
        *(batch.microbatch_size, batch.bn_span, optimizer.name, optimizer.precision),
    )


def measure(context: Context, *, name: str) -> Found:
    """Measure both steps in turn: rate, time of each kind of kernel, and peak of memory."""
    found, device, recipe = Found(), context.device, recipes()[name][0]
    settings, own_words = settings_of(recipe, context)
    found.conditions |= {"recipes": ", ".join(recipes()[name]), "step": own_words}
    found.conditions["precision"] = load_config(["--config", recipe]).optimizer.precision
    contestants: dict[str, Contestant] = {}
    rows = []
    with ExitStack() as stack:
        for step, values in settings.items():
            before = _allocated(device)
            made = contestant(values, config=recipe, with_nccl=device.type == "cuda")
            contestants[step] = stack.enter_context(closing(made))
            rows.append(kernels.row_of(f"{step}, {made.batch} images", made, context, found))
            if device.type == "cuda":
                found.add(f"{step}, peak of memory", [_peak_gb(made.run, device, before=before)], unit="GB of memory")
        rates = rates_in_turn(contestants, size=context.size, device=device)
    for step, each in rates.items():
        found.add(step, each, unit="images/s")
    found.add(RATIO, ratios(rates[OWN], rates[ONE_GHOST]), unit="ratio")
    if device.type != "cuda":
        found.left_out["peak of memory"] = "needs a GPU"
    if not context.compiles:
        found.left_out["compile"] = TOO_LONG
    found.tables["kernels, ms"] = rows
    return found


def settings_of(recipe: str, context: Context) -> tuple[dict[str, dict[str, Any]], str]:
    """Return the overrides of both steps, and the recipe's own step in words; each step has one microbatch.

    The microbatch, compilation and CUDA graph are those that compute.mode=auto chooses on one such GPU.
    """
    config = load_config(["--config", recipe])
    memory = torch.cuda.get_device_properties(context.device).total_memory if context.device.type == "cuda" else None
    chosen = choose_mode(config, world_size=1, memory_bytes=memory).config
    mode = {
        "compute.mode": "eager",
        "compute.compile": chosen.compute.compile if context.compiles else None,
        "compute.compile_fallback": False,  # a step that is not compiled fails the part
        "compute.cuda_graph": chosen.compute.cuda_graph and context.compiles,
    }
    num_ghosts = chosen.batch.microbatch_size // chosen.batch.bn_span
    ghost, whole = chosen.batch.bn_span, ONE_GHOST_IMAGES
    common: dict[str, Any] = {"data.loader": "synthetic", **mode}
    if context.is_small:
        ghost, whole = max(2, ghost // SHRUNK), whole // SHRUNK
        num_ghosts = min(MOST_GHOSTS, num_ghosts)
        common |= dict(_small(config, context))
    return {
        ONE_GHOST: common | _batch(whole, ghost=whole),
        OWN: common | _batch(num_ghosts * ghost, ghost=ghost),
    }, f"ghost batches of {chosen.batch.bn_span} images, {describe_mode(chosen)}"


def _small(config: Config, context: Context) -> Iterator[tuple[str, Any]]:
    """Yield the overrides of the small size."""
    size, model = context.size, config.model.name
    if model not in SMALL_IMAGE_SIZES:
        yield "model.name", size.model
    yield "data.num_classes", size.num_classes
    yield "data.image_size", SMALL_IMAGE_SIZES.get(model, size.image_size)
    yield "data.train_sizes", None
    yield "compute.cpu_threads", 1
    yield from in_precision(context.precision).items()


def _batch(images: int, *, ghost: int) -> dict[str, Any]:
    keys = ("batch.global_batch_size", "batch.microbatch_size")
    return {**dict.fromkeys(keys, images), "batch.bn_span": ghost, "data.num_synthetic_samples": 1000 * images}


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _peak_gb(run: Callable[[int], object], device: torch.device, *, before: int) -> float:
    """Return the most memory of a step with its weights, without what was allocated before it was made."""
    torch.cuda.reset_peak_memory_stats(device)
    run(1)
    torch.cuda.synchronize(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e9
