"""Report the input rate: a record, a line, and hints with remedies if steps wait for images."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import median_high
from typing import Any

from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import READERS, AugmentConfig
from bigbatch.trainer.input.data_root import url_of

Rates = Mapping[str, float | None]
"""Images per second of the loader and of each stage alone; None for a missing stage."""

PARTS = ("loader", "read", "decode", "copy", "augment")
STAGES = {
    "read": "reading",
    "decode": "decoding",
    "copy": "copying to the GPU",
    "augment": "augmentation on the device",
}
PREFETCHED, IN_STEP = ("read", "decode"), ("copy", "augment")
"""Stages that work ahead (steps wait if they are slow), and stages that are part of the step."""
SLOW_RANK = 0.7
"""Share of the median rank's rate, below which a rank is named."""
MAX_RATIO = 3
"""Most times that the slowest stage alone is as fast as the loader it limits; two stages may share its threads."""
LARGE_WAIT = 0.05
"""Share of step time spent waiting for images, above which there is a hint."""
LARGE_SHARE = 0.5
"""Share of a step's own work that a stage takes, above which there is a hint."""
MEMORY = "/dev/shm"
UNEXPLAINED = "; no stage explains that: too few images to measure it, or their first reading was slow"
AUGMENTATIONS = tuple(field.name for field in fields(AugmentConfig) if field.name != "randaugment_magnitude")
"""Keys of the section augment that cost time unless 0."""


def pixels_left(sizes: Iterable[tuple[int, int]], *, max_side: int) -> float:
    """Return the share of pixels left if images (height, width) are shrunk until no shorter side exceeds max_side."""
    pairs = [(height * width, min(1.0, max_side / min(height, width)) ** 2) for height, width in sizes]
    return sum(pixels * share for pixels, share in pairs) / sum(pixels for pixels, _ in pairs)


@dataclass(frozen=True, kw_only=True)
class InputSettings:
    """Keys of the config and facts of the machine on which remedies depend."""

    loader: str
    num_threads: int
    num_cores: int
    """Cores that each rank may use alone."""
    is_on_gpu: bool
    is_packed: bool
    stage: str | None
    bind_numa: bool
    precision: str
    augmentations: tuple[str, ...]
    """Keys of active augmentations."""
    max_side: int
    """Shorter side to which larger images can be shrunk without harm to the model's image size."""
    pixels_left: float
    """Share of the stored pixels left after shrinking to max_side."""
    is_remote: bool = False
    """Whether the images lie in an object store or on a web server."""


def input_settings(
    config: Config, *, sizes: Iterable[tuple[int, int]], num_cores: int, is_on_gpu: bool, is_packed: bool
) -> InputSettings:
    """Return the settings. sizes: (height, width) of some stored images; is_packed: the images lie in shards."""
    data, some = config.data, list(sizes)
    max_side = 2 * max([data.image_size, *(size for _, size in data.train_sizes or ())])
    return InputSettings(
        loader=data.loader,
        num_threads=data.num_threads,
        num_cores=num_cores,
        is_on_gpu=is_on_gpu,
        is_packed=is_packed,
        is_remote=url_of(data.root) is not None,
        stage=data.stage,
        bind_numa=data.bind_numa,
        precision=config.optimizer.precision,
        augmentations=tuple(f"augment.{key}" for key in AUGMENTATIONS if getattr(config.augment, key)),
        max_side=max_side,
        pixels_left=pixels_left(some, max_side=max_side) if some else 1.0,
    )


def more_threads(settings: InputSettings) -> list[str]:
    """Return the remedy of more threads, if there are cores for them."""
    if settings.num_threads >= settings.num_cores:
        return []
    return [f"raise data.num_threads ({settings.num_threads} now; each rank may use {settings.num_cores} cores)"]


def remedies(stage: str, settings: InputSettings) -> list[str]:
    """Return the remedies of a slow stage, or of "share" if loader and model compete for cores."""
    more_cores = f"give each rank more cores ({settings.num_cores} now)"
    if stage == "read":
        if settings.is_remote:
            return [
                "keep what is read on a disk of each node by data.cache_dir, with a data.cache_gb that holds all of it"
            ]
        if not settings.is_packed:
            return ["pack the images into shards by `bigbatch data pack`, and copy those near the GPU by data.stage"]
        if settings.stage is None:
            return ["copy the shards near the GPU: name a folder of each node's own disk or memory in data.stage"]
        if not settings.stage.startswith(MEMORY):
            return [f"name a faster folder than {settings.stage} in data.stage, such as one in {MEMORY}"]
        # two threads are enough to read from memory
        return more_threads(settings) if settings.num_threads < 2 else [more_cores]
    if stage == "augment":
        some = "some of " if len(settings.augmentations) > 1 else ""
        fewer = [f"leave out {some}{', '.join(settings.augmentations)}"] if settings.augmentations else []
        if not settings.is_on_gpu:
            return fewer or [more_cores]
        return fewer + (["set optimizer.precision to bf16"] if settings.precision in ("fp32", "tf32") else [])
    can_use_gpu = settings.is_on_gpu and settings.loader != "dali"
    on_gpu = ["decode on the GPU by data.loader=dali"] if can_use_gpu else []
    if stage == "copy":
        return [*([] if settings.bind_numa else ["set data.bind_numa to true"]), *on_gpu]
    smaller = []
    if not settings.is_packed and settings.pixels_left <= 0.8:  # packing saves a fifth of the decoding, or more
        share = f"{100 * settings.pixels_left:.0f}% of their pixels are left"
        smaller = [f"shrink the images once by `bigbatch data pack --short-side {settings.max_side}` ({share})"]
    if stage == "decode":
        return [*more_threads(settings), *on_gpu, *smaller] or [more_cores]
    few = settings.num_threads > settings.num_cores
    fewer = [f"lower data.num_threads to {settings.num_cores} ({settings.num_threads} now)"] if few else []
    return [*fewer, *on_gpu, *smaller, more_cores]


def merge_rates(ranks: Sequence[Rates]) -> Rates:
    """Return the rates over all ranks: in lock-step the slowest rank limits all."""
    found: dict[str, float | None] = {}
    for part in PARTS:
        there = [rate for rates in ranks if (rate := rates[part]) is not None]
        found[part] = len(ranks) * min(there) if there else None
    return found


def slowest_stage(rates: Rates, *, among: Iterable[str] = tuple(STAGES)) -> str:
    """Return the stage with the fewest images per second."""
    there = {stage: rate for stage in among if (rate := rates[stage]) is not None}
    return min(there, key=lambda stage: there[stage])


def limiting_stage(rates: Rates, *, among: Iterable[str] = tuple(STAGES)) -> str | None:
    """Return the slowest stage; None if it does not explain the loader's rate."""
    stage = slowest_stage(rates, among=among)
    return stage if (rates[stage] or 0.0) <= MAX_RATIO * (rates["loader"] or 0.0) else None


def input_record(rates: Rates, *, step: int) -> dict[str, Any]:
    """Return the record of kind "input" of a run that starts after step."""
    named = {f"{part}_images_per_second": rates[part] for part in PARTS}
    return {"step": step, **named, "slowest_stage": slowest_stage(rates)}


def describe_input(ranks: Sequence[Rates]) -> str:
    """Return a line with all rates, and the slowest rank if it is below SLOW_RANK of the median."""
    rates = merge_rates(ranks)
    parts = [f"{stage} {rate:,.0f}" for stage in STAGES if (rate := rates[stage]) is not None]
    together = f"the input alone: {rates['loader']:,.0f} images/s (each stage alone: {', '.join(parts)})"
    slow = _slow_rank(ranks) if len(ranks) > 1 else ""
    return together + (slow or (UNEXPLAINED if limiting_stage(rates) is None else ""))


def _slow_rank(ranks: Sequence[Rates]) -> str:
    alone = [rates["loader"] or 0.0 for rates in ranks]
    least, middle = min(alone), median_high(alone)
    if least >= SLOW_RANK * middle:
        return ""
    return f"; rank {alone.index(least)} is the slowest: {least:,.0f} images/s, the median rank {middle:,.0f}"


@dataclass(frozen=True, kw_only=True)
class InputWait:
    """Waits of a run for images: those of the rank with the longest, since the other ranks wait for it."""

    wait_fraction: float
    compute_images_per_second: float
    """Rate over all ranks without the waits."""
    steps: int


@dataclass(frozen=True)
class MeasuredInput:
    """Input rate of each rank without training, measured on all at the same time, and the settings."""

    ranks: tuple[Rates, ...]
    settings: InputSettings

    @property
    def rates(self) -> Rates:
        """Return the rates over all ranks."""
        return merge_rates(self.ranks)


def hints(waited: InputWait, measured: MeasuredInput | None, *, was_probed: bool, is_healed: bool = False) -> list[str]:
    """Return hints for a run with steps that wait for images, or spend most time copying and augmenting them.

    was_probed: the config asked for a measurement, even if it failed. is_healed: the job was interrupted since then.
    """
    found: list[str | None] = []
    if waited.wait_fraction > LARGE_WAIT:
        waits = f"steps wait {100 * waited.wait_fraction:.0f}% of their time for images"
        if measured is not None:
            found = [_on_waiting(waits, waited, measured)]
        else:
            why = "data.probe_seconds=1 does that"
            if is_healed:
                why = "the job was interrupted since its start, and did not measure again"
            elif was_probed:
                why = "the measurement met an image that cannot be used, which `bigbatch data check` names"
            found = [f"{waits}; what limits the input was not measured: {why}"]
    if measured is not None:
        found += [_on_work(stage, waited, measured) for stage in IN_STEP]
    return [text for text in found if text]


def _on_waiting(waits: str, waited: InputWait, measured: MeasuredInput) -> str | None:
    rates, settings = measured.rates, measured.settings
    alone = f"alone the input delivers {rates['loader']:,.0f} images/s, the model takes "
    alone += f"{waited.compute_images_per_second:,.0f}"
    if settings.loader not in READERS:
        how = "" if "." in settings.loader else f": data.loader={settings.loader} makes each batch within its step"
        return f"{waits}{how} ({alone})"
    if min(rates[part] or 0.0 for part in ("loader", *PREFETCHED)) < waited.compute_images_per_second:
        finding, slow_rank = f"the input limits this run, {waits}: {alone}", _slow_rank(measured.ranks)
        if (stage := limiting_stage(rates, among=PREFETCHED)) is None:
            return finding + (slow_rank or UNEXPLAINED)
        finding += f"; {STAGES[stage]} is its slowest stage ({rates[stage]:,.0f}){slow_rank}"
        return _advised(finding, remedies(stage, settings))
    if waited.wait_fraction <= LARGE_WAIT + 1 / waited.steps:
        return None  # less than a step: the first batch always has a wait
    finding = f"{waits}, though {alone}"
    if not settings.is_on_gpu or settings.num_threads >= settings.num_cores:
        return _advised(f"{finding}: the two compete for the same cores", remedies("share", settings))
    if (settings.stage or "").startswith(MEMORY):
        return _advised(finding, more_threads(settings))
    why = "the storage was slower during the run than while it was measured, when images may have come from memory"
    return _advised(f"{finding}: {why}", remedies("read", settings))


def _on_work(stage: str, waited: InputWait, measured: MeasuredInput) -> str | None:
    """Return a hint on a stage that is part of the step, if it takes a large share of the step's own work."""
    rate = measured.rates[stage]
    if rate is None or waited.compute_images_per_second <= LARGE_SHARE * rate:
        return None
    share = min(1.0, waited.compute_images_per_second / rate)
    finding = (
        f"{STAGES[stage]} takes {100 * share:.0f}% of a step's time without waits: alone it does {rate:,.0f} "
        f"images/s, the whole step {waited.compute_images_per_second:,.0f}"
    )
    return _advised(finding, remedies(stage, measured.settings))


def _advised(finding: str, advice: list[str]) -> str:
    return f"{finding}: {', or '.join(advice)}" if advice else finding
