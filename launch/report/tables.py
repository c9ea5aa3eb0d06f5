"""What a report says in words and tables, for the terminal, Markdown and the page alike."""

import html
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Shown
from rich.text import Text

from bigbatch.launch.report.accuracy import ToAccuracy
from bigbatch.launch.report.collect import SweepResults
from bigbatch.launch.report.split import PARTS, Efficiency, by_variant

WORTH_NAMING = 0.005
"""A loss of less of the step is not named in a sentence."""

NOT_MEASURED = "Not measured"


@dataclass(frozen=True)
class Table:
    """A table is rows of text under a title."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def findings(found: Sequence[Efficiency], *, name: str | None) -> list[str]:
    """Say the main thing about each variant in plain words; name: of the sweep, where there are several."""
    lines = []
    for label, points in by_variant(found).items():
        last = points[-1]
        label = f"{name}: {label}" if name else label
        if last.point == last.base:
            lines.append(
                f"{label}: measured on {count(last.point.ranks, 'rank')} alone, which says nothing of scaling."
            )
            continue
        missing = (
            f" Efficiency is beside {count(last.base.ranks, 'rank')}: the point with {last.base.fewest_ranks} has no "
            "figures."
            if last.lacks_base
            else ""
        )
        told = {last.name_of(part): share for part, share in last.losses.items() if share is not None}
        lost = {name: share for name, share in told.items() if share >= WORTH_NAMING}
        causes = sorted(lost, key=lambda name: -lost[name])
        rest = f" Lost to {', '.join(f'{name} ({percent(lost[name])})' for name in causes)}." if causes else ""
        if last.unsplit is not None:
            rest += f" {NOT_MEASURED}: the parts of steps that are replayed as CUDA graphs, but for input."
        lines.append(
            f"{label}: {count(last.point.ranks, 'rank')} on {count(last.point.nodes, 'node')} train "
            f"{last.speedup:.2f} times as fast as {last.base.ranks} ({percent(last.efficiency)} efficiency)."
            f"{rest}{missing}"
        )
    return lines


def scaling_table(found: Sequence[Efficiency], *, name: str | None, is_gpu: bool, price: float | None) -> Table:
    """Make a row for each point; price: of an hour of a rank."""
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
            percent(each.efficiency),
            count(each.base.ranks, "rank") + (f", not {each.base.fewest_ranks}" if each.lacks_base else ""),
            f"{each.point.million_images_rank_hours:,.3f}",
            *([_energy(each.point.joules_per_image, images=1e6)] if is_told else []),
            *([] if price is None else [f"{price * each.point.million_images_rank_hours:,.2f}"]),
        )
        for each in found
    ]
    return Table(_title("Speed and efficiency", name), head, tuple(rows))


def split_table(found: Sequence[Efficiency], *, name: str | None) -> Table:
    """Show where the rest goes; shares of the step, which add up to 100% minus efficiency."""
    points = [each for each in found if each.point != each.base]
    keys = [key for key, _ in found[0].point.variant]
    head = (*keys, "ranks", "step", "efficiency", "local batch or computing", *PARTS[1:])
    rows = [
        (
            *(str(value) for _, value in each.point.variant),
            str(each.point.ranks),
            f"{1000 * each.point.step.seconds:,.1f} ms",
            percent(each.efficiency),
            *(_share(each.losses[part]) for part in PARTS),
        )
        for each in points
    ]
    return Table(_title("What is lost, as shares of the step", name), head, tuple(rows))


def _share(share: float | None) -> str:
    return NOT_MEASURED.lower() if share is None else percent(share)


def _title(title: str, name: str | None) -> str:
    return f"{title}: {name}" if name else title


def unmeasured_table(results: Sequence[SweepResults]) -> Table:
    """List points without figures."""
    rows = [(str(sweep.folder), *each) for sweep in results for each in sweep.unmeasured]
    return Table(NOT_MEASURED, ("sweep", "point", "why"), tuple(rows))


def accuracy_table(runs: Sequence[tuple[Path, ToAccuracy]], *, price: float | None) -> Table:
    """Show time and cost of each run; price: of an hour of a rank."""
    head = ("run", "top-1", "target", "epoch", "hours", "cost", "energy")
    return Table("Time to accuracy", head, tuple(_accuracy_row(folder, run, price=price) for folder, run in runs))


def _accuracy_row(folder: Path, run: ToAccuracy, *, price: float | None) -> tuple[str, ...]:
    shown = run.shown
    if shown is None:
        return (str(folder), "no evaluation", "", "", "", "", "")
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
    """Show what the figures depend on."""
    return Table("Conditions", ("", ""), tuple((key, str(value)) for key, value in conditions.items()))


def _energy(joules: float | None, *, images: float = 1.0) -> str:
    return "not told by a driver" if joules is None else f"{images * joules / 3.6e6:.4f} kWh"


def cost(rank_hours: float, *, is_gpu: bool, price: float | None) -> str:
    """Write 28.0 GPU-hours, and what they cost where an hour has a price."""
    text = f"{rank_hours:,.3f} {'GPU-hours' if is_gpu else 'hours of a rank on a CPU'}"
    return text if price is None else f"{text}, {price * rank_hours:,.2f} at {price:g} an hour"


def percent(share: float) -> str:
    """Write 0.923 -> '92.3%'."""
    return f"{round(100 * share, 1) + 0.0:.1f}%"  # no -0.0


def count(number: int, thing: str) -> str:
    """Write 2, 'rank' -> '2 ranks'."""
    return f"{number} {thing}{'' if number == 1 else 's'}"


def stdout_console() -> Console:
    """Make one as wide as the terminal; where there is none, wide enough not to break rows."""
    return Console(width=None if sys.stdout.isatty() else 200)


def show_table(table: Table, console: Console) -> None:
    """Print it on a terminal, without taking its text for markup."""
    shown = Shown(title=Text(table.title))
    for name in table.head:
        shown.add_column(Text(name))
    for row in table.rows:
        shown.add_row(*map(Text, row))
    console.print(shown)


def markdown(table: Table) -> str:
    """Write it as Markdown, with a heading."""
    lines = [table.head, ("---",) * len(table.head), *table.rows]
    rows = ("| " + " | ".join(map(plain_cell, line)) + " |" for line in lines)
    return "\n".join([f"## {table.title}", "", *rows])


def plain_cell(text: str) -> str:
    """Write a cell of a Markdown table: in one line, and no markup of its own."""
    return html.escape(" ".join(text.split()), quote=False).replace("|", "\\|")
