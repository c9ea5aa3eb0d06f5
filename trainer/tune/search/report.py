"""What a search shows and leaves: lines and a bar, a table, best.yaml, a picture."""

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bigbatch.colours import COLOURS
from bigbatch.comm.rendezvous.environ import terminal_columns
from bigbatch.errors import printable
from bigbatch.trainer.config.file import dump_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.tune.search.experiment import Search
from bigbatch.trainer.tune.search.records import (
    Metric,
    TrialRecord,
    ranked,
    result_of,
    show_number,
    show_result,
    show_values,
)
from bigbatch.trainer.tune.search.space import Axis, SearchRange

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TABLE_ROWS = 20
NUM_TICKS = 4
"""Of a range: so many numbers of up to eight characters fit side by side."""
TICK_CHARACTERS = 30
"""Of all values of a grid; more do not fit side by side."""


@dataclasses.dataclass(frozen=True)
class Shown:
    """Says where the search speaks."""

    say: Callable[[str], None]
    advance: Callable[..., None]
    """By so many trials; by one without a number."""


@contextmanager
def progress(total: int, say: Callable[[str], None]) -> Iterator[Shown]:
    """Show a bar of trials on a terminal, with lines above it; elsewhere the lines alone, by say."""
    columns = terminal_columns()
    if columns is None:
        yield Shown(say, lambda count=1: None)
        return
    console = Console(force_terminal=True, width=columns)
    shown = (TextColumn("trials"), MofNCompleteColumn(), BarColumn(bar_width=None), TimeElapsedColumn())
    with Progress(*shown, console=console, expand=True) as bar:
        task = bar.add_task("", total=total)
        yield Shown(
            lambda text: bar.console.print(printable(text), highlight=False, markup=False),
            lambda count=1: bar.advance(task, count),
        )


def table(records: Sequence[TrialRecord], *, metric: Metric) -> list[str]:
    """List the best trials, aligned, from the best down; then those that did not finish."""
    keys = list(records[0].values)
    unit = "top-1 (%)" if metric == "top1" else "loss (nats)"
    rows = [["trial", "round", *keys, unit, "seconds", "outcome"]]
    rows += [_row(record, keys, metric=metric) for record in ranked(records, metric=metric)[:TABLE_ROWS]]
    *columns, last = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    aligned = [[cell.rjust(width) for cell in column] for column, width in zip(columns, widths, strict=True)]
    lines = ["  ".join(cells) for cells in zip(*aligned, last, strict=True)]
    left_out = len(records) - TABLE_ROWS
    return [*lines, f"and {left_out} more in trials.jsonl"] if left_out > 0 else lines


def _row(record: TrialRecord, keys: Sequence[str], *, metric: Metric) -> list[str]:
    ended = record.ended
    result = "-" if ended.result is None else show_number(ended.result, metric=metric)
    outcome = ended.state if ended.state == "finished" else f"{ended.state}: {ended.reason}"
    own = (record.values[key] for key in keys)
    return [str(record.number), str(record.round), *own, result, f"{ended.seconds:.1f}", outcome]


def as_json_lines(records: Sequence[TrialRecord]) -> str:
    """Write one object a line, flat but for the values."""
    rows = ({**dataclasses.asdict(record), **dataclasses.asdict(record.ended)} for record in records)
    return "".join(json.dumps({key: value for key, value in row.items() if key != "ended"}) + "\n" for row in rows)


def best_yaml(config: Config, best: TrialRecord, *, folder: Path, search: Search) -> str:
    """Write the whole experiment, and in a comment where its values are from."""
    where = " ".join(str(folder).split())
    return (
        f"# bigbatch tune search in {where}: trial {best.number} of {search.trials}, of {search.epochs} epochs each\n"
        f"# {show_result(result_of(best), metric=search.metric)} with {show_values(best.values)}\n"
        f"{dump_config(config)}"
    )


def plot_search(records: Sequence[TrialRecord], axes: Sequence[Axis], path: Path, *, metric: Metric) -> None:
    """Plot results over each searched value, as a PNG."""
    figure = draw_search(records, axes, metric=metric)
    RunDir(path.parent).save_plot(path, figure)


def draw_search(records: Sequence[TrialRecord], axes: Sequence[Axis], *, metric: Metric) -> "Figure":
    """Draw what plot_search saves: a colour per round, hollow where a trial was pruned, a star at the table's first."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(5.6, 4.2 * len(axes)), 4.4), layout="constrained")
    panels = figure.subplots(1, len(axes), sharey=True, squeeze=False)[0]
    for panel, axis in zip(panels, axes, strict=True):
        for number in sorted({record.round for record in records}):
            _draw(panel, [record for record in records if record.round == number], axis, metric=metric)
        _draw_best(panel, ranked(records, metric=metric)[0], axis, metric=metric)
        _set_ticks(panel, axis)
        panel.set(xlabel=axis.key)
        panel.grid(alpha=0.25, linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("top-1 (%)" if metric == "top1" else "cross-entropy (nats)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, 2 * len(axes)), fontsize=8, frameon=False)
    failed = sum(record.ended.state == "failed" for record in records)
    told = "1 trial" if len(records) == 1 else f"{len(records)} trials"
    figure.suptitle(told + (f", without {failed} that failed" if failed else ""), fontsize=13)
    return figure


def _draw(panel: "Axes", records: Sequence[TrialRecord], axis: Axis, *, metric: Metric) -> None:
    color = COLOURS[(records[0].round - 1) % len(COLOURS)]
    for state, face in (("finished", color), ("pruned", "none")):
        mine = [record for record in records if record.ended.state == state and record.ended.result is not None]
        label = f"round {records[0].round}" + (", pruned (where it ended)" if state == "pruned" else "")
        if mine:
            points = [_point(record, axis, metric=metric) for record in mine]
            panel.scatter(*zip(*points, strict=True), edgecolors=color, facecolors=face, label=label)


def _draw_best(panel: "Axes", best: TrialRecord, axis: Axis, *, metric: Metric) -> None:
    x, y = _point(best, axis, metric=metric)
    label = f"best that finished: trial {best.number}, {show_result(result_of(best), metric=metric)}"
    panel.scatter([x], [y], marker="*", s=200, color="black", zorder=3, label=label)


def _set_ticks(panel: "Axes", axis: Axis) -> None:
    """Place few enough that their texts do not touch."""
    if not isinstance(axis, SearchRange):
        is_long = sum(map(len, axis.texts)) > TICK_CHARACTERS
        rotation, side = (30, "right") if is_long else (0, "center")
        panel.set_xticks(range(len(axis.texts)), labels=list(axis.texts), rotation=rotation, ha=side)
        panel.set_xlim(-0.5, len(axis.texts) - 0.5)
        return
    steps = range(NUM_TICKS)
    if axis.is_log:
        panel.set_xscale("log")
        panel.minorticks_off()
        ticks = [axis.low * (axis.high / axis.low) ** (i / steps[-1]) for i in steps]
    else:
        ticks = [axis.low + (axis.high - axis.low) * i / steps[-1] for i in steps]
    texts = dict.fromkeys(str(round(tick)) if axis.is_int else f"{tick:.3g}" for tick in ticks)
    panel.set_xticks([float(text) for text in texts], labels=list(texts))


def _point(record: TrialRecord, axis: Axis, *, metric: Metric) -> tuple[float, float]:
    """Place a trial: grids by the index of the value."""
    text, result = record.values[axis.key], result_of(record)
    x = float(text) if isinstance(axis, SearchRange) else float(axis.texts.index(text))
    return x, 100 * result if metric == "top1" else result
