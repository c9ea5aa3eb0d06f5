"""The pictures of a report, as matplotlib draws them: PNG and SVG files, and SVG text for a page."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bigbatch.colours import COLOURS
from bigbatch.errors import printable
from bigbatch.launch.efficiency import PARTS, Efficiency, by_variant, variant_name
from bigbatch.launch.report.accuracy import ToAccuracy
from bigbatch.launch.report.doubts import doubts
from bigbatch.launch.words import count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = "osD^vP*"
PART_COLOURS = dict(zip(PARTS, ("#999999", "#D55E00", "#0072B2", "#E69F00"), strict=True))
UNSPLIT_COLOUR = "#DDDDDD"


def draw_efficiency(found: Sequence[Efficiency], *, name: str | None) -> "Figure":
    """Draw efficiency over ranks, a line for each variant, without points in doubt; name: of the sweep, of several."""
    figure, axes = _figure()
    shown = [each for each in found if not doubts(each)]
    for index, points in enumerate(by_variant(shown).values()):
        axes.plot(
            [each.point.ranks for each in points],
            [100 * each.efficiency for each in points],
            marker=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            linestyle="-" if index < len(COLOURS) else "--",
            label=label_of(points[0]),
        )
    ticks = sorted({each.point.ranks for each in shown})
    axes.axhline(100, color="0.6", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_ylim(0, max(105, *(104 * each.efficiency for each in shown)))
    title = "Images per second and rank, beside the fewest ranks"
    if left_out := len(found) - len(shown):
        title += f" (without {count(left_out, 'point')} in doubt)"
    axes.set(xlabel="ranks", ylabel="scaling efficiency (%)", title=_title(title, name))
    axes.legend(fontsize=8)
    return figure


def draw_split(points: Sequence[Efficiency], *, name: str | None) -> "Figure":
    """Draw where the efficiency goes, a bar for each of these points, of which each has a smaller one beside it."""
    figure, axes = _figure(height=1.8 + 0.36 * len(points))
    names = [f"{label_of(each)}, {each.point.ranks} ranks" for each in points]
    right, left = [0.0] * len(points), [0.0] * len(points)
    bars = [(legend_of(part, points), PART_COLOURS[part], [each.losses[part] for each in points]) for part in PARTS]
    if any(each.unsplit is not None for each in points):
        bars.append(("not measured", UNSPLIT_COLOUR, [each.unsplit for each in points]))
    for label, colour, shares in bars:
        values = [100 * (share or 0.0) for share in shares]
        starts = [right[i] if value >= 0 else left[i] for i, value in enumerate(values)]
        axes.barh(names, values, left=starts, color=colour, label=label)
        for i, value in enumerate(values):
            if value >= 0:
                right[i] += value
            else:
                left[i] += value
    axes.invert_yaxis()
    axes.axvline(0, color="0.3", linewidth=1)
    xlabel = "share of the step (%): what is lost to 100% efficiency; left of 0: won"
    axes.set(xlabel=xlabel, title=_title("Where it goes", name))
    figure.legend(loc="outside lower center", ncols=len(bars), fontsize=8)
    return figure


def draw_accuracy(runs: Sequence[tuple[str, ToAccuracy]]) -> "Figure":
    """Draw top-1 over hours."""
    figure, axes = _figure()
    for index, (label, run) in enumerate(runs):
        axes.plot(
            [each.hours for each in run.evaluations],
            [100 * each.top1 for each in run.evaluations],
            marker=MARKERS[index % len(MARKERS)],
            color=COLOURS[index % len(COLOURS)],
            label=plain_text(label),
        )
    axes.set(xlabel="hours", ylabel="top-1 (%)", title="Accuracy")
    axes.legend(fontsize=8)
    return figure


def label_of(each: Efficiency) -> str:
    """Write the values of a variant for matplotlib."""
    return plain_text(variant_name(each))


def _title(title: str, name: str | None) -> str:
    return f"{title}\n{plain_text(name)}" if name else title


def plain_text(text: str) -> str:
    """Return text in one line, without matplotlib's mathematics between dollar signs."""
    return printable(text).replace("$", r"\$")


def legend_of(part: str, points: Sequence[Efficiency]) -> str:
    """Return what a part is called; computing, by both names where both occur."""
    return " or ".join(sorted({each.name_of(part) for each in points}))


def _figure(height: float = 4.2) -> "tuple[Figure, Any]":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.3)
    return figure, axes
