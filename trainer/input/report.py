"""Report the input rate: a record, a line, and hints if steps wait for images."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any

from bigbatch.trainer.config.sections import READERS
from bigbatch.trainer.input.remedies import MEMORY, InputSettings, more_threads, remedies

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
LARGE_WAIT = 0.05
"""Share of step time spent waiting for images, above which there is a hint."""
LARGE_SHARE = 0.5
"""Share of a step's own work that a stage takes, above which there is a hint."""


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


def input_record(rates: Rates, *, step: int) -> dict[str, Any]:
    """Return the record of kind "input" of a run that starts after step."""
    named = {f"{part}_images_per_second": rates[part] for part in PARTS}
    return {"step": step, **named, "slowest_stage": slowest_stage(rates)}


def describe_input(ranks: Sequence[Rates]) -> str:
    """Return a line with all rates, and the slowest rank if it is below SLOW_RANK of the median."""
    rates = merge_rates(ranks)
    parts = [f"{stage} {rate:,.0f}" for stage in STAGES if (rate := rates[stage]) is not None]
    together = f"the input alone: {rates['loader']:,.0f} images/s (each stage alone: {', '.join(parts)})"
    return together + _slow_rank(ranks)


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

    was_probed: the config asked for a measurement, even if it failed. is_healed: the job has lost a rank since then.
    """
    found: list[str | None] = []
    if waited.wait_fraction > LARGE_WAIT:
        waits = f"steps wait {100 * waited.wait_fraction:.0f}% of their time for images"
        if measured is not None:
            found = [_on_waiting(waits, waited, measured)]
        else:
            why = "data.probe_seconds=1 does that"
            if is_healed:
                why = "the job has lost a rank since its start, and did not measure again"
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
        return f"{waits}: data.loader={settings.loader} makes each batch within its step ({alone})"
    stage = slowest_stage(rates, among=PREFETCHED)
    if min(rates[part] or 0.0 for part in ("loader", *PREFETCHED)) < waited.compute_images_per_second:
        slow = f"{STAGES[stage]} is its slowest stage ({rates[stage]:,.0f}){_slow_rank(measured.ranks)}"
        return _advised(f"the input limits this run, {waits}: {alone}; {slow}", remedies(stage, settings))
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
