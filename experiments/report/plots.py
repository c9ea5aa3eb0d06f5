"""The plots of a report, drawn by matplotlib: PNG and SVG files, and SVG text for a page."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bigbatch.colours import COLOURS, new_figure
from bigbatch.errors import printable
from bigbatch.experiments.engine.plan import BATCH
from bigbatch.experiments.report.collect import ToAccuracy
from bigbatch.experiments.report.compare import Cell, Comparison, Curves, cell_label, short_key
from bigbatch.experiments.report.predictions import PredictedRate
from bigbatch.experiments.report.tables import doubts
from bigbatch.launch.efficiency import PARTS, Efficiency, by_variant, variant_name
from bigbatch.words import count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osD^vP*"
PART_COLOURS = dict(zip(PARTS, ("#999999", "#D55E00", "#0072B2", "#E69F00"), strict=True))
UNSPLIT_COLOUR = "#DDDDDD"
MAX_BARS = 50
"""Bars of a plot: more do not fit on a screen."""
MAX_NAMED = 20
"""Lines that a legend names, and ticks that are labelled."""
MAX_CHARACTERS = 60
"""Characters of a label: a longer one leaves no room for the plot."""


def draw_efficiency(
    found: Sequence[Efficiency], *, name: str | None, predicted: Mapping[int, PredictedRate] | None = None
) -> "Figure":
    """Draw efficiency over ranks, a line for each variant, without points in doubt, and the ideal line.

    A band spans the lowest to the highest report. predicted: by a point's number; drawn as dashes with 90% intervals.
    name: the sweep, if several.
    """
    figure, (axes,) = new_figure(8, 4.2)
    shown = [each for each in found if not doubts(each)]
    axes.axhline(100, color="0.4", linewidth=1, linestyle=":", label="ideal")
    tops = [105.0]
    for index, points in enumerate(by_variant(shown).values()):
        ranks, shares = [each.point.ranks for each in points], [100 * each.efficiency for each in points]
        _draw_line(axes, index, ranks, shares, label=plain_text(variant_name(points[0])))
        colour = COLOURS[index % len(COLOURS)]
        ends = [
            [share * end(each.point.rates) / each.point.rate for each, share in zip(points, shares, strict=True)]
            for end in (min, max)
        ]
        axes.fill_between(ranks, *ends, color=colour, alpha=0.15, linewidth=0)
        tops += ends[1]
        if drawn := [row for each in points if (row := _predicted(each, predicted or {}))]:
            label = "predicted, with 90% intervals" if index == 0 else None
            x, middles, lows, highs = zip(*drawn, strict=True)
            errors = [
                [m - low for m, low in zip(middles, lows, strict=True)],
                [h - m for m, h in zip(middles, highs, strict=True)],
            ]
            axes.errorbar(x, middles, yerr=errors, color=colour, linestyle="--", linewidth=1, capsize=3, label=label)
    ticks = sorted({each.point.ranks for each in shown})
    axes.set_xscale("log", base=2)
    _set_ticks(axes, ticks)
    axes.set_ylim(0, 1.02 * max(tops))
    title = "Images per second and rank, relative to the fewest ranks"
    if left_out := len(found) - len(shown):
        title += f" (without {count(left_out, 'point')} in doubt)"
    axes.set(xlabel="ranks", ylabel="scaling efficiency (%); band: all reports", title=_title(title, name))
    axes.legend(fontsize=8)
    return figure


def _predicted(each: Efficiency, rates: Mapping[int, PredictedRate]) -> tuple[float, ...] | None:
    """Return the ranks of a point, and its predicted efficiency with the interval; None if it was not predicted."""
    point, base = (next((rates[n] for n in one.numbers if n in rates), None) for one in (each.point, each.base))
    if point is None or base is None:
        return None
    ideal = base.rate * each.point.ranks / each.base.ranks
    return (each.point.ranks, *(100 * rate / ideal for rate in (point.rate, point.low, point.high)))


def draw_split(points: Sequence[Efficiency], *, name: str | None) -> "Figure":
    """Draw the parts of lost efficiency as a stacked bar for each point; none of the points is its own base."""
    title = "Lost efficiency" + _left_out(points)
    points = points[:MAX_BARS]
    figure, (axes,) = new_figure(8, height=1.8 + 0.36 * len(points))
    names = [f"{plain_text(variant_name(each))}, {count(each.point.ranks, 'rank')}" for each in points]
    right, left = [0.0] * len(points), [0.0] * len(points)
    bars = [
        # both names of computing if both occur
        (" or ".join(sorted({each.name_of(part) for each in points})), colour, [each.losses[part] for each in points])
        for part, colour in PART_COLOURS.items()
    ]
    if any(each.unsplit is not None for each in points):
        bars.append(("not measured", UNSPLIT_COLOUR, [each.unsplit for each in points]))
    for label, colour, shares in bars:
        values = [100 * (share or 0.0) for share in shares]
        starts = [right[i] if value >= 0 else left[i] for i, value in enumerate(values)]
        axes.barh(range(len(names)), values, left=starts, color=colour, label=label)
        for i, value in enumerate(values):
            if value >= 0:
                right[i] += value
            else:
                left[i] += value
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.axvline(0, color="0.3", linewidth=1)
    xlabel = "lost efficiency, share of the step (%); negative: gained"
    axes.set(xlabel=xlabel, title=_title(title, name))
    figure.legend(loc="outside lower center", ncols=len(bars), fontsize=8)
    return figure


def draw_comparison(found: Comparison) -> "Figure":
    """Draw top-1, else images per second, over a numeric key: a line for each value of other keys, a band over seeds.

    Without a numeric key, and for cumulative cases, draw a bar of seconds and points of accuracy for each cell.
    """
    numbers = [key for key in found.keys if all(type(cell.values[key]) in (int, float) for cell in found.cells)]
    key = next((key for key in (BATCH, "ranks", *numbers) if key in numbers), None)
    return _draw_cases(found) if key is None or found.is_cumulative else _draw_lines(found, key)


def _draw_lines(found: Comparison, key: str) -> "Figure":
    name, factor = ("top1", 100.0) if found.has_accuracy else ("images_per_second", 1.0)
    figure, (axes,) = new_figure(8, 4.2)
    lines: dict[str, list[Cell]] = {}
    for cell in sorted((cell for cell in found.cells if cell.values_of(name)), key=lambda cell: cell.values[key]):
        lines.setdefault(cell_label(cell, without=key), []).append(cell)
    for index, (label, cells) in enumerate(sorted(lines.items())):
        x = [cell.values[key] for cell in cells]
        y = [factor * (cell.mean(name) or 0.0) for cell in cells]
        band = [factor * (cell.deviation(name) or 0.0) for cell in cells]
        _draw_line(axes, index, x, y, label=plain_text(label))
        low, high = ([a + sign * b for a, b in zip(y, band, strict=True)] for sign in (-1, 1))
        axes.fill_between(x, low, high, color=COLOURS[index % len(COLOURS)], alpha=0.15, linewidth=0)
    ticks = sorted({cell.values[key] for cell in found.cells})
    if ticks[0] > 0 and ticks[-1] / ticks[0] >= 4:
        axes.set_xscale("log", base=2)
    _set_ticks(axes, ticks)
    is_banded = any(cell.deviation(name) is not None for cell in found.cells)
    what = "top-1 (%)" if found.has_accuracy else "images per second"
    axes.set(xlabel=plain_text(short_key(key)), ylabel=what + (", mean and standard deviation" if is_banded else ""))
    axes.set_title(plain_text(found.title))
    if any(lines):
        axes.legend(fontsize=8)
    return figure


def _draw_cases(found: Comparison) -> "Figure":
    panels, cells = 2 if found.has_accuracy else 1, found.cells[:MAX_BARS]
    figure, (left, *right) = new_figure(9, 1.6 + 0.36 * len(cells), num_panels=panels, sharey=True)
    names = [plain_text(cell_label(cell)) or found.title for cell in cells]
    left.barh(range(len(cells)), [cell.median("seconds") for cell in cells], color=COLOURS[0])
    left.set_yticks(range(len(cells)), names)
    for row, cell in enumerate(cells):
        seconds, top1 = cell.values_of("seconds"), [100 * each for each in cell.values_of("top1")]
        left.plot([min(seconds), max(seconds)], [row, row], color="black", linewidth=1)
        if right and top1:
            right[0].plot(top1, [row] * len(top1), "o", color=COLOURS[1], alpha=0.4, label="runs")
            spread = 100 * (cell.deviation("top1") or 0.0)
            right[0].errorbar([statistics.fmean(top1)], [row], xerr=[spread], fmt="|", color="black", capsize=3)
    left.invert_yaxis()
    title = plain_text(found.title) + _left_out(found.cells)
    left.set(xlabel="training (s), median and range", title=title)
    for axes in right:
        axes.set(xlabel="top-1 (%), runs, mean and standard deviation")
    return figure


def draw_curves(cells: Sequence[tuple[str, Sequence[Curves]]]) -> "Figure":
    """Draw loss and top-1 over epochs: a line for each cell, the mean of its runs, and a band over its seeds."""
    named = min(len(cells), MAX_NAMED + 1)
    columns = 1 if max(len(plain_text(label)) for label, _ in cells) > 30 else 3
    figure, axes_2 = new_figure(10, 4.2 + 0.22 * math.ceil(named / columns), num_panels=2, sharex=True)
    panels = dict(zip(("loss", "top1"), axes_2, strict=True))
    for name, axes in panels.items():
        factor = 100.0 if name == "top1" else 1.0
        for index, (label, runs) in enumerate(cells):
            curves = [getattr(run, name) for run in runs]
            epochs = sorted(set.intersection(*map(set, curves)))
            each = [[factor * curve[epoch] for curve in curves] for epoch in epochs]
            _draw_line(axes, index, epochs, [statistics.fmean(one) for one in each], label=plain_text(label))
            axes.lines[-1].set(markevery=max(1, len(epochs) // 8), markersize=4)
            if len(runs) > 1:
                mean, colour = [statistics.fmean(one) for one in each], COLOURS[index % len(COLOURS)]
                spread = [statistics.stdev(one) for one in each]
                ends = ([m + sign * s for m, s in zip(mean, spread, strict=True)] for sign in (-1, 1))
                axes.fill_between(epochs, *ends, color=colour, alpha=0.15, linewidth=0)
                if len(epochs) == 1:  # a band has no width there
                    axes.errorbar(epochs, mean, yerr=spread, color=colour, capsize=3)
    panels["loss"].set(xlabel="epoch", ylabel="training loss", xlim=(0, None))
    panels["top1"].set(xlabel="epoch", ylabel="top-1 (%)")
    is_banded = any(len(runs) > 1 for _, runs in cells)
    figure.suptitle("Learning curves" + (": mean and standard deviation over seeds" if is_banded else ""), fontsize=11)
    handles, labels = panels["top1"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8)
    return figure


def draw_accuracy(runs: Sequence[tuple[str, ToAccuracy]]) -> "Figure":
    figure, (axes,) = new_figure(8, 4.2)
    is_long = any(each.hours >= 1 for _, run in runs for each in run.evaluations)
    unit, per_hour = ("hours", 1) if is_long else ("minutes", 60)
    for index, (label, run) in enumerate(runs):
        times, top1 = [per_hour * each.hours for each in run.evaluations], [100 * each.top1 for each in run.evaluations]
        _draw_line(axes, index, times, top1, label=plain_text(label))
    axes.set(xlabel=unit, ylabel="top-1 (%)", title="Accuracy")
    axes.legend(fontsize=8)
    return figure


def _title(title: str, name: str | None) -> str:
    return f"{title}\n{plain_text(name)}" if name else title


def _left_out(bars: Sequence[object]) -> str:
    return f": the first {MAX_BARS} of {len(bars)}" if len(bars) > MAX_BARS else ""


def plain_text(text: str) -> str:
    """Return text in one line, without matplotlib's mathematics; a long one is shortened to its two ends.

    A blank comes before _, because a legend leaves out labels that begin with it.
    """
    half = MAX_CHARACTERS // 2
    text = printable(text)
    text = text if len(text) <= MAX_CHARACTERS else f"{text[:half]} ... {text[-half:]}"
    return " " * text.startswith("_") + text.replace("$", r"\$")


def _set_ticks(axes: Any, ticks: Sequence[float]) -> None:
    if len(ticks) <= MAX_NAMED:
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()


def _draw_line(axes: Any, index: int, x: Sequence[float], y: Sequence[float], *, label: str) -> None:
    """Draw the index-th line of a plot, distinct from the others in colour, marker or dashes."""
    marker, colour = MARKERS[index % len(MARKERS)], COLOURS[index % len(COLOURS)]
    named = label if index < MAX_NAMED else "others" if index == MAX_NAMED else ""
    axes.plot(x, y, marker=marker, color=colour, linestyle="-" if index < len(COLOURS) else "--", label=named or None)
