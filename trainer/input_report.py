"""What is said about the speed of the input: records, a line, and a hint where the model waits for pictures."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.trainer.config import Config
from bigbatch.trainer.data.shards import is_packed

Rates = Mapping[str, float | None]
"""Pictures per second over all ranks, of the loader and of each stage on its own; None for a stage there is not."""

PARTS = ("loader", "read", "decode", "copy", "augment")
STAGES = {
    "read": "reading",
    "decode": "decoding",
    "copy": "copying to the GPU",
    "augment": "augmentation on the device",
}
LARGE_WAIT = 0.05
"""Share of step time spent waiting for pictures, above which there is a hint."""
IN_STEP = ("resident", "synthetic")
"""Loaders that make a batch when it is asked for, and not ahead."""
MEMORY = "/dev/shm"
AUGMENTATIONS = ("color_jitter", "randaugment_ops", "cutout_size", "mixup_alpha", "cutmix_alpha")
"""Settings of the section augment that cost time where they are not 0."""


def slowest_stage(rates: Rates) -> str:
    """The stage with the fewest pictures per second."""
    there = {stage: rate for stage in STAGES if (rate := rates[stage]) is not None}
    return min(there, key=lambda stage: there[stage])


def input_record(rates: Rates, *, step: int) -> dict[str, Any]:
    """The record of kind "input" of a run that starts after step."""
    named = {f"{part}_images_per_second": rates[part] for part in PARTS}
    return {"step": step, **named, "slowest_stage": slowest_stage(rates)}


def describe_input(rates: Rates) -> str:
    """All rates in one line."""
    parts = [f"{stage} {rate:,.0f}" for stage in STAGES if (rate := rates[stage]) is not None]
    return f"the input alone: {rates['loader']:,.0f} images/s (each stage alone: {', '.join(parts)})"


def pixels_left(sizes: Iterable[tuple[int, int]], *, max_side: int) -> float:
    """Share of the pixels of pictures (height, width) that is left when no shorter side exceeds max_side."""
    pairs = [(height * width, min(1.0, max_side / min(height, width)) ** 2) for height, width in sizes]
    return sum(pixels * share for pixels, share in pairs) / sum(pixels for pixels, _ in pairs)


@dataclass(frozen=True, kw_only=True)
class InputSettings:
    """What the remedies depend on: keys of the config and facts of the machine."""

    loader: str
    num_threads: int
    num_cores: int
    """That each rank may use, for itself."""
    is_on_gpu: bool
    is_packed: bool
    stage: str | None
    bind_numa: bool
    precision: str
    augmentations: tuple[str, ...]
    """Keys of those that are on."""
    max_side: int
    """To which larger pictures can be shrunk, for the size that the model sees."""
    pixels_left: float
    """Share of the stored pixels after that."""


def input_settings(
    config: Config, *, sizes: Iterable[tuple[int, int]], num_cores: int, is_on_gpu: bool
) -> InputSettings:
    """sizes: (height, width) of some stored pictures, if the loader reads any."""
    data, some = config.data, list(sizes)
    max_side = 2 * max([data.image_size, *(size for _, size in data.train_sizes or ())])
    return InputSettings(
        loader=data.loader,
        num_threads=data.num_threads,
        num_cores=num_cores,
        is_on_gpu=is_on_gpu,
        is_packed=is_packed(Path(data.root) / "train"),
        stage=data.stage,
        bind_numa=data.bind_numa,
        precision=config.optimizer.precision,
        augmentations=tuple(f"augment.{key}" for key in AUGMENTATIONS if getattr(config.augment, key)),
        max_side=max_side,
        pixels_left=pixels_left(some, max_side=max_side) if some else 1.0,
    )


@dataclass(frozen=True, kw_only=True)
class Waited:
    """How a run went."""

    wait_fraction: float
    compute_images_per_second: float
    """Without the waiting, over all ranks."""
    steps: int


@dataclass(frozen=True)
class MeasuredInput:
    """What the input delivers on its own, and by which settings."""

    rates: Rates
    settings: InputSettings


def hint(waited: Waited, measured: MeasuredInput | None) -> str | None:
    """What limits a run whose steps wait for pictures, and what helps; None where they hardly wait."""
    if waited.wait_fraction <= LARGE_WAIT:
        return None
    waits = f"steps wait {100 * waited.wait_fraction:.0f}% of their time for pictures"
    if measured is None:
        return f"{waits}; what limits the input was not measured: data.probe_seconds=1 does that"
    rates, settings = measured.rates, measured.settings
    if settings.loader in IN_STEP:
        return f"{waits}: data.loader={settings.loader} makes each batch within its step ({_alone(rates, waited)})"
    stage = slowest_stage(rates)
    if min(rate for rate in rates.values() if rate is not None) < waited.compute_images_per_second:
        slow = f"{STAGES[stage]} is its slowest stage ({rates[stage]:,.0f})"
        finding = f"the input limits this run, {waits}: {_alone(rates, waited)}; {slow}"
        return _advised(finding, _REMEDIES[stage](settings))
    if waited.wait_fraction <= LARGE_WAIT + 1 / waited.steps:
        return None  # the first batch is always waited for, here for less than a step
    finding = f"{waits}, though {_alone(rates, waited)}: the two compete for the same cores"
    return _advised(finding, _share_better(settings))


def _alone(rates: Rates, waited: Waited) -> str:
    return (
        f"alone the input delivers {rates['loader']:,.0f} images/s, the model takes "
        f"{waited.compute_images_per_second:,.0f}"
    )


def _advised(finding: str, remedies: list[str]) -> str:
    return f"{finding}: {', or '.join(remedies)}" if remedies else finding


def _read_better(settings: InputSettings) -> list[str]:
    if not settings.is_packed:
        return ["pack the pictures into shards by `bigbatch data pack`, and copy those near the GPU by data.stage"]
    if settings.stage is None:
        return ["copy the shards near the GPU: name a folder of each node's own disk or memory in data.stage"]
    if not settings.stage.startswith(MEMORY):
        return [f"name a faster folder than {settings.stage} in data.stage, such as one in {MEMORY}"]
    # no more than two threads read
    return _more_threads(settings) if settings.num_threads < 2 else [_more_cores(settings)]


def _decode_better(settings: InputSettings) -> list[str]:
    remedies = [*_more_threads(settings), *_decode_on_gpu(settings), *_smaller_pictures(settings)]
    return remedies or [_more_cores(settings)]


def _copy_better(settings: InputSettings) -> list[str]:
    near = [] if settings.bind_numa else ["set data.bind_numa to true"]
    return [*near, *_decode_on_gpu(settings)]


def _augment_better(settings: InputSettings) -> list[str]:
    fewer = [f"leave out some of {', '.join(settings.augmentations)}"] if settings.augmentations else []
    if not settings.is_on_gpu:
        return fewer or [_more_cores(settings)]
    return fewer + (["set optimizer.precision to bf16"] if settings.precision == "fp32" else [])


_REMEDIES = {"read": _read_better, "decode": _decode_better, "copy": _copy_better, "augment": _augment_better}


def _share_better(settings: InputSettings) -> list[str]:
    few = settings.num_threads > settings.num_cores
    fewer = [f"lower data.num_threads to {settings.num_cores} ({settings.num_threads} now)"] if few else []
    return [*fewer, *_decode_on_gpu(settings), *_smaller_pictures(settings), _more_cores(settings)]


def _more_threads(settings: InputSettings) -> list[str]:
    if settings.num_threads >= settings.num_cores:
        return []
    return [f"raise data.num_threads ({settings.num_threads} now; each rank may use {settings.num_cores} cores)"]


def _decode_on_gpu(settings: InputSettings) -> list[str]:
    is_possible = settings.is_on_gpu and settings.loader != "dali"
    return ["decode on the GPU by data.loader=dali"] if is_possible else []


def _smaller_pictures(settings: InputSettings) -> list[str]:
    """Where they are not packed yet, and a fifth of the decoding or more would go."""
    if settings.is_packed or settings.pixels_left > 0.8:
        return []
    return [
        f"shrink the pictures once by `bigbatch data pack --max-side {settings.max_side}` "
        f"({100 * settings.pixels_left:.0f}% of their pixels are left)"
    ]


def _more_cores(settings: InputSettings) -> str:
    return f"give each rank more cores ({settings.num_cores} now)"
