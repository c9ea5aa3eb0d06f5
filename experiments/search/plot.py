"""The plot of a search: results over each value."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bigbatch.colours import COLOURS, new_figure
from bigbatch.experiments.engine.folder import DONE, FAILED, PRUNED
from bigbatch.experiments.search.space import Axis, SearchRange
from bigbatch.experiments.search.study import Metric, TrialRecord, best_record, show_result
from bigbatch.words import count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_TICKS = 4
"""Ticks of a range: so many numbers of up to eight characters fit side by side."""
TICK_CHARACTERS = 30
"""Characters of all values of a grid; more do not fit side by side."""


def draw_search(records: Sequence[TrialRecord], axes: Sequence[Axis], *, metric: Metric) -> "Figure":
    """Draw results over each value: a colour per round, hollow where a trial was pruned, a star at the best."""
    figure, panels = new_figure(max(5.6, 4.2 * len(axes)), 4.4, num_panels=len(axes), sharey=True)
    best = best_record(records, metric=metric)
    for panel, axis in zip(panels, axes, strict=True):
        for number in sorted({record.round for record in records}):
            color = COLOURS[(number - 1) % len(COLOURS)]
            for state, face in ((DONE, color), (PRUNED, "none")):
                mine = [each for each in records if (each.round, each.state) == (number, state)]
                points = [_point(record, axis, metric=metric) for record in mine if record.result is not None]
                label = f"round {number}" + (", pruned (where it ended)" if state == PRUNED else "")
                if points:
                    panel.scatter(*zip(*points, strict=True), edgecolors=color, facecolors=face, label=label)
        if best:
            label = f"best that finished: trial {best.number}, {show_result(best, metric=metric)}"
            x, y = _point(best, axis, metric=metric)
            panel.scatter([x], [y], marker="*", s=200, color="black", zorder=3, label=label)
        _set_ticks(panel, axis)
        panel.set(xlabel=axis.key)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("top-1 (%)" if metric == "top1" else "cross-entropy (nats)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, 2 * len(axes)), fontsize=8, frameon=False)
    failed = sum(record.state == FAILED for record in records)
    figure.suptitle(count(len(records), "trial") + (f", without {failed} that failed" if failed else ""), fontsize=13)
    return figure


def _set_ticks(panel: "Axes", axis: Axis) -> None:
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
    """Return a trial's coordinates: its value, or the value's index in a list, and its result."""
    text, result = record.values[axis.key], record.result or 0.0
    x = float(text) if isinstance(axis, SearchRange) else float(axis.texts.index(text))
    return x, 100 * result if metric == "top1" else result
