"""Sentences and tables of a report, for the terminal, Markdown and the page."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bigbatch.experiments.engine.folder import PENDING, SUBMITTED
from bigbatch.experiments.engine.plan import describe_values
from bigbatch.experiments.report.collect import Evaluated, RunResults, SweepResults, ToAccuracy
from bigbatch.launch.efficiency import PARTS, Efficiency, MeasuredPoint, by_variant
from bigbatch.launch.tables import NOT_MEASURED, UNREPORTED, Table, duration, table_of
from bigbatch.trainer.report.noise_scale import describe_noise_scale
from bigbatch.words import count, percent

ENOUGH_REPORTS = 3
"""Least reports of a point; fewer have no spread that would show a disturbance."""
MAX_SPREAD = 0.2
"""Largest distance between the quartiles of a point's rates, as a share of their median."""
MAX_EFFICIENCY = 1.05
"""Highest credible efficiency: more ranks with the same local batch are not faster each, but for measurement noise."""


def doubts(each: Efficiency) -> list[str]:
    """Return reasons to doubt an efficiency; a doubted one is not stated as a result. Empty for the base."""
    point, base = each.point, each.base
    if point == base:
        return []
    found = []
    fewest, noisiest = min(point, base, key=lambda one: len(one.rates)), max(point, base, key=_spread)
    if len(fewest.rates) < ENOUGH_REPORTS:
        has = f"{count(fewest.ranks, 'rank')}: {count(len(fewest.rates), 'report')}, not {ENOUGH_REPORTS} or more"
        found.append(f"too few reports ({has})")
    if point.device != base.device:
        has = f"{count(base.ranks, 'rank')}: {base.device}, {count(point.ranks, 'rank')}: {point.device}"
        found.append(f"other devices or threads per rank ({has})")
    if _spread(noisiest) > MAX_SPREAD:
        has = f"{count(noisiest.ranks, 'rank')}: half of the reports lie {percent(_spread(noisiest))} apart"
        found.append(f"a busy machine ({has})")
    if each.efficiency > MAX_EFFICIENCY and not found:
        has = f"busy at {count(base.ranks, 'rank')}, or smaller local batches that fit into caches"
        found.append(f"more than perfect (the machine was {has})")
    return found


def advice(each: Efficiency, *, rerun: Callable[[MeasuredPoint], str]) -> str:
    """Return what settles an efficiency that is in doubt; rerun: command that measures a point again."""
    point, base = each.point, each.base
    if min(len(point.rates), len(base.rates)) < ENOUGH_REPORTS:
        return "take more steps, or lower run.log_every_steps"
    if point.device != base.device:
        return "state compute.cpu_threads in options, or take the same devices"
    noisiest = max(point, base, key=_spread)
    repeated = noisiest if _spread(noisiest) > MAX_SPREAD else base
    return f"measure {count(repeated.ranks, 'rank')} again: {rerun(repeated)}"


def _spread(point: MeasuredPoint) -> float:
    """Return the distance of the quartiles of its rates over their median; 0 for one rate."""
    if len(point.rates) < 2:
        return 0.0
    low, _, high = quantiles(point.rates, n=4, method="inclusive")
    return (high - low) / median(point.rates)


def findings(found: Sequence[Efficiency], *, name: str | None) -> list[str]:
    """Return the main result of each variant in words; name: the sweep, if there are several."""
    lines = []
    for label, points in by_variant(found).items():
        label = f"{name}: {label}" if name else label
        compared = [each for each in points if each.point != each.base]
        if not compared:
            ranks = count(points[-1].point.ranks, "rank")
            lines.append(f"{label}: measured on {ranks} alone, which says nothing about scaling.")
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
    ranks, nodes = count(each.point.ranks, "rank"), count(each.point.nodes, "node")
    text = (
        f"{ranks} on {nodes} train {each.speedup:.2f} times as fast as {each.base.ranks} "
        f"({percent(each.efficiency)} efficiency).{each.lost_to}"
    )
    if each.unsplit is not None:
        text += f" {NOT_MEASURED}: the parts of steps that are replayed as CUDA graphs, but for input."
    if each.lacks_base:
        base, fewest = count(each.base.ranks, "rank"), each.base.fewest_ranks
        text += f" Efficiency is relative to {base}: the point with {fewest} has no figures."
    return text


def scaling_table(found: Sequence[Efficiency], *, name: str | None, is_gpu: bool, price: float | None) -> Table:
    """Make a row for each point; price: of a rank for an hour."""
    points = [each.point for each in found]
    single = [of_variant[0] for of_variant in by_variant(found).values() if len(of_variant) == 1]
    columns = {
        **_values(found),
        "nodes": [str(point.nodes) for point in points],
        "global batch": [f"{point.global_batch_size:,}" for point in points],
        "images/s": [f"{point.rate:,.1f}" for point in points],
        "lowest to highest": [f"{min(point.rates):,.1f} to {max(point.rates):,.1f}" for point in points],
        "reports": [str(len(point.rates)) for point in points],
        "efficiency": ["" if each in single else _efficiency(each) for each in found],
        "relative to": [
            count(each.base.ranks, "rank") + (f", not {each.base.fewest_ranks}" if each.lacks_base else "")
            for each in found
        ],
        f"{'GPU-hours' if is_gpu else 'rank-hours'} of 10^6 images": [
            f"{point.million_images_rank_hours:,.3f}" for point in points
        ],
    }
    if any(point.joules_per_image is not None for point in points):
        columns["energy of 10^6 images"] = [_energy(point.joules_per_image, images=1e6) for point in points]
    if price is not None:
        columns["cost of 10^6 images"] = [f"{price * point.million_images_rank_hours:,.2f}" for point in points]
    return _table("Speed and efficiency", name, columns)


def doubts_table(found: Sequence[Efficiency], *, name: str | None, rerun: Callable[[MeasuredPoint], str]) -> Table:
    """List the points in doubt, why, and what settles it; rerun: command that measures a point again."""
    doubted = [each for each in found if doubts(each)]
    columns = {
        "why": ["; ".join(doubts(each)) for each in doubted],
        "what settles it": [advice(each, rerun=rerun) for each in doubted],
    }
    return _table("In doubt", name, _values(doubted) | columns)


def split_table(found: Sequence[Efficiency], *, name: str | None) -> Table:
    """Show the parts of lost efficiency, as shares of the step; they add up to 100% minus efficiency."""
    points = [each for each in found if each.point != each.base]
    columns = {
        "step": [f"{1000 * each.point.step.seconds:,.1f} ms" for each in points],
        "efficiency": [_efficiency(each) for each in points],
    }
    for part in PARTS:
        shares = [each.losses[part] for each in points]
        columns["local batch or computing" if part == PARTS[0] else part] = [
            NOT_MEASURED.lower() if share is None else percent(share) for share in shares
        ]
    return _table("What is lost, as shares of the step", name, _values(points) | columns)


def _values(found: Sequence[Efficiency]) -> dict[str, list[str]]:
    keys = dict.fromkeys(key for each in found for key, _ in each.point.variant)
    columns = {key: [str(dict(each.point.variant).get(key, "")) for each in found] for key in keys}
    return columns | {"ranks": [str(each.point.ranks) for each in found]}


def _table(title: str, name: str | None, columns: Mapping[str, Sequence[str]]) -> Table:
    return table_of(f"{title}: {name}" if name else title, columns)


def _efficiency(each: Efficiency) -> str:
    return percent(each.efficiency) + (" ?" if doubts(each) else "")


def describe_waiting(waiting: Mapping[str, int]) -> str:
    """Write {'pending': 3, 'submitted': 1} -> 'of its points 3 are pending, 1 is in Slurm's queue'."""
    words = {PENDING: "pending", SUBMITTED: "in Slurm's queue"}
    verbs = {state: "is" if number == 1 else "are" for state, number in waiting.items()}
    parts = [f"{number} {verbs[state]} {words[state]}" for state, number in sorted(waiting.items())]
    return f"of its points {', '.join(parts)}"


def unmeasured_table(results: Sequence[SweepResults]) -> Table:
    rows = [(str(sweep.folder), *each) for sweep in results for each in sweep.unmeasured]
    return Table(NOT_MEASURED, ("sweep", "point", "why"), tuple(rows))


def accuracy_table(runs: Sequence[tuple[Path, ToAccuracy]], *, price: float | None) -> Table:
    """Show time and cost of each run; price: of a rank for an hour."""
    is_told = any(run.shown and run.shown.joules is not None for _, run in runs)
    is_paid = price is not None or any(run.is_gpu for _, run in runs)
    head = ("run", "top-1", "target", "epoch", "time", *["cost"] * is_paid, *["energy"] * is_told)
    rows = []
    for folder, run in runs:
        if (shown := run.shown) is None:
            rows.append((str(folder), "", "no evaluation", *[""] * (len(head) - 3)))
            continue
        row = (
            str(folder),
            f"{100 * shown.top1:.2f} %",
            "its best"
            if run.best and run.target == run.best.top1
            else f"{100 * run.target:.2f} %" + ", not reached" * (not run.reached),
            f"{shown.epoch:.1f}",
            duration(shown.hours),
            *[cost(shown.rank_hours, is_gpu=run.is_gpu, price=price)] * is_paid,
            *[_energy(shown.joules)] * is_told,
        )
        rows.append(row)
    return Table("Time to accuracy", head, tuple(rows))


def noise_table(runs: Sequence[RunResults]) -> Table:
    """Show the noise scale of runs that measured it, in images, with a 95% band."""
    rows = [(str(run.folder), describe_noise_scale(run.noise_scale)) for run in runs if run.noise_scale]
    return Table("Noise scale, late in the run", ("run", "images (95% band)"), tuple(rows))


def conditions_table(conditions: Mapping[str, Any]) -> Table:
    """Show the conditions of the figures, a sweep's options as YAML values."""
    rows = [(key, describe_values(each) if isinstance(each, dict) else str(each)) for key, each in conditions.items()]
    return Table("Conditions", ("", ""), tuple(rows))


def _energy(joules: float | None, *, images: float = 1.0) -> str:
    return UNREPORTED if joules is None else f"{images * joules / 3.6e6:.4f} kWh"


def time_and_cost(shown: Evaluated, *, is_gpu: bool, price: float | None) -> str:
    return ", ".join(filter(None, (duration(shown.hours), cost(shown.rank_hours, is_gpu=is_gpu, price=price))))


def cost(rank_hours: float, *, is_gpu: bool, price: float | None) -> str:
    """Write 28.0 -> '28.000 GPU-hours', and their cost if an hour has a price; empty for CPUs without a price."""
    if not is_gpu and price is None:
        return ""
    text = f"{rank_hours:,.3f} {'GPU-hours' if is_gpu else 'hours of a rank on a CPU'}"
    return text if price is None else f"{text}, {price * rank_hours:,.2f} at {price:g} an hour"
