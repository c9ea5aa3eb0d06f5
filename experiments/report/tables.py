"""Sentences and tables of a report, for the terminal, Markdown and the page."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bigbatch.experiments.engine.plan import describe_values
from bigbatch.experiments.report.accuracy import ToAccuracy
from bigbatch.experiments.report.collect import RunResults, SweepResults
from bigbatch.experiments.report.doubts import advice, doubts
from bigbatch.launch.efficiency import PARTS, Efficiency, MeasuredPoint, by_variant
from bigbatch.launch.tables import NOT_MEASURED, NOT_TOLD, Table
from bigbatch.trainer.run.noise_scale import describe_noise_scale
from bigbatch.words import count, percent

WORTH_NAMING = 0.005
"""A smaller loss, as a share of the step, is not named in a sentence."""


def findings(found: Sequence[Efficiency], *, name: str | None) -> list[str]:
    """Return the main result of each variant in words; name: the sweep, if there are several."""
    lines = []
    for label, points in by_variant(found).items():
        label = f"{name}: {label}" if name else label
        compared = [each for each in points if each.point != each.base]
        if not compared:
            ranks = count(points[-1].point.ranks, "rank")
            lines.append(f"{label}: measured on {ranks} alone, which says nothing of scaling.")
            continue
        stated = [each for each in compared if not doubts(each)]
        if stated:
            lines.append(f"{label}: {_headline(stated[-1])}")
        if reasons := doubts(compared[-1]):
            ranks = count(compared[-1].point.ranks, "rank")
            lines.append(f"{label}: no efficiency is stated for {ranks}, as it is in doubt: {'; '.join(reasons)}.")
    return lines


def _headline(each: Efficiency) -> str:
    """Return how fast a point is, and what its efficiency is lost to."""
    told = {each.name_of(part): share for part, share in each.losses.items() if share is not None}
    lost = {name: share for name, share in told.items() if share >= WORTH_NAMING}
    causes = sorted(lost, key=lambda name: -lost[name])
    ranks, nodes = count(each.point.ranks, "rank"), count(each.point.nodes, "node")
    text = (
        f"{ranks} on {nodes} train {each.speedup:.2f} times as fast as {each.base.ranks} "
        f"({percent(each.efficiency)} efficiency)."
    )
    if causes:
        text += f" Lost to {', '.join(f'{name} ({percent(lost[name])})' for name in causes)}."
    if each.unsplit is not None:
        text += f" {NOT_MEASURED}: the parts of steps that are replayed as CUDA graphs, but for input."
    if each.lacks_base:
        beside, fewest = count(each.base.ranks, "rank"), each.base.fewest_ranks
        text += f" Efficiency is beside {beside}: the point with {fewest} has no figures."
    return text


def scaling_table(found: Sequence[Efficiency], *, name: str | None, is_gpu: bool, price: float | None) -> Table:
    """Make a row for each point; price: of a rank for an hour."""
    is_told = any(each.point.joules_per_image is not None for each in found)
    keys = [key for key, _ in found[0].point.variant]
    head = (*keys, "ranks", "nodes", "global batch", "images/s", "lowest to highest", "reports", "efficiency", "beside")
    head += (f"{'GPU-hours' if is_gpu else 'rank-hours'} of 10^6 images",)
    if is_told:
        head += ("energy of 10^6 images",)
    if price is not None:
        head += ("cost of 10^6 images",)
    rows = [
        (
            *(str(value) for _, value in each.point.variant),
            *(str(each.point.ranks), str(each.point.nodes), f"{each.point.global_batch_size:,}"),
            f"{each.point.rate:,.1f}",
            f"{min(each.point.rates):,.1f} to {max(each.point.rates):,.1f}",
            str(len(each.point.rates)),
            _efficiency(each),
            count(each.base.ranks, "rank") + (f", not {each.base.fewest_ranks}" if each.lacks_base else ""),
            f"{each.point.million_images_rank_hours:,.3f}",
            *([_energy(each.point.joules_per_image, images=1e6)] if is_told else []),
            *([] if price is None else [f"{price * each.point.million_images_rank_hours:,.2f}"]),
        )
        for each in found
    ]
    return Table(_title("Speed and efficiency", name), head, tuple(rows))


def doubts_table(found: Sequence[Efficiency], *, name: str | None, again: Callable[[MeasuredPoint], str]) -> Table:
    """List the points in doubt, why, and what settles it; again: the command that measures a point again."""
    keys = [key for key, _ in found[0].point.variant]
    rows = [
        (
            *(str(value) for _, value in each.point.variant),
            str(each.point.ranks),
            "; ".join(reasons),
            advice(each, again=again),
        )
        for each in found
        if (reasons := doubts(each))
    ]
    return Table(_title("In doubt", name), (*keys, "ranks", "why", "what settles it"), tuple(rows))


def split_table(found: Sequence[Efficiency], *, name: str | None) -> Table:
    """Show the parts of lost efficiency, as shares of the step; they add up to 100% minus efficiency."""
    points = [each for each in found if each.point != each.base]
    keys = [key for key, _ in found[0].point.variant]
    head = (*keys, "ranks", "step", "efficiency", "local batch or computing", *PARTS[1:])
    rows = [
        (
            *(str(value) for _, value in each.point.variant),
            str(each.point.ranks),
            f"{1000 * each.point.step.seconds:,.1f} ms",
            _efficiency(each),
            *(_share(each.losses[part]) for part in PARTS),
        )
        for each in points
    ]
    return Table(_title("What is lost, as shares of the step", name), head, tuple(rows))


def _efficiency(each: Efficiency) -> str:
    return percent(each.efficiency) + (" ?" if doubts(each) else "")


def _share(share: float | None) -> str:
    return NOT_MEASURED.lower() if share is None else percent(share)


def _title(title: str, name: str | None) -> str:
    return f"{title}: {name}" if name else title


def unmeasured_table(results: Sequence[SweepResults]) -> Table:
    """List points without figures."""
    rows = [(str(sweep.folder), *each) for sweep in results for each in sweep.unmeasured]
    return Table(NOT_MEASURED, ("sweep", "point", "why"), tuple(rows))


def accuracy_table(runs: Sequence[tuple[Path, ToAccuracy]], *, price: float | None) -> Table:
    """Show time and cost of each run; price: of a rank for an hour."""
    is_told = any(run.shown and run.shown.joules is not None for _, run in runs)
    head = ("run", "top-1", "target", "epoch", "hours", "cost", *(["energy"] if is_told else []))
    rows = [_accuracy_row(folder, run, price=price)[: len(head)] for folder, run in runs]
    return Table("Time to accuracy", head, tuple(rows))


def noise_table(runs: Sequence[RunResults]) -> Table:
    """Show the noise scale of runs that measured it, in images, with a 95% band."""
    rows = [(str(run.folder), describe_noise_scale(run.noise_scale)) for run in runs if run.noise_scale]
    return Table("Noise scale, late in the run", ("run", "images (95% band)"), tuple(rows))


def _accuracy_row(folder: Path, run: ToAccuracy, *, price: float | None) -> tuple[str, ...]:
    shown = run.shown
    if shown is None:
        return (str(folder), "", "no evaluation", "", "", "", "")
    return (
        str(folder),
        f"{100 * shown.top1:.2f} %",
        f"{100 * run.target:.2f} %" + ("" if run.reached else ", not reached"),
        f"{shown.epoch:.1f}",
        f"{shown.hours:.3f} h",
        cost(shown.rank_hours, is_gpu=run.is_gpu, price=price),
        _energy(shown.joules),
    )


def conditions_table(conditions: Mapping[str, Any]) -> Table:
    """Show the conditions of the figures."""
    return Table("Conditions", ("", ""), tuple((key, _as_stated(value)) for key, value in conditions.items()))


def _as_stated(value: Any) -> str:
    """Write a sweep's options in YAML, and not in Python."""
    return describe_values(value) if isinstance(value, dict) else str(value)


def _energy(joules: float | None, *, images: float = 1.0) -> str:
    return NOT_TOLD if joules is None else f"{images * joules / 3.6e6:.4f} kWh"


def cost(rank_hours: float, *, is_gpu: bool, price: float | None) -> str:
    """Write 28.0 GPU-hours, and their cost if an hour has a price."""
    text = f"{rank_hours:,.3f} {'GPU-hours' if is_gpu else 'hours of a rank on a CPU'}"
    return text if price is None else f"{text}, {price * rank_hours:,.2f} at {price:g} an hour"
