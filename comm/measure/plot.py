"""The plot of a sweep: bus bandwidth and time by size, a line per algorithm."""

from collections.abc import Sequence
from pathlib import Path

from bigbatch.colours import COLOURS
from bigbatch.comm.measure.figures import BenchRow, Limit, show_bytes
from bigbatch.files import replacing_named

MARKERS = "osD^vPX"


def plot_sweep(rows: Sequence[BenchRow], path: Path, *, limit: Limit | None, title: str, caption: str) -> None:
    """Draw busbw (log size) and time (both log) of each algorithm; the links' limit dashed. Format by path's suffix."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5.2), layout="constrained")
    busbw_axes, time_axes = figure.subplots(1, 2)
    time_axes.set(title="Time", ylabel="time (µs), median", yscale="log")
    sizes = sorted({row.size for row in rows})
    shown = sizes[:: max(1, -(-len(sizes) // 10))]
    for axes in (busbw_axes, time_axes):
        for i, algorithm in enumerate(dict.fromkeys(row.algorithm for row in rows)):
            mine = [row for row in rows if row.algorithm == algorithm]
            axes.plot(
                [row.size for row in mine],
                [row.busbw_gb_per_s if axes is busbw_axes else row.time_us for row in mine],
                marker=MARKERS[i % len(MARKERS)],
                color=COLOURS[i % len(COLOURS)],
                markersize=5,
                linewidth=1.8,
                label=algorithm,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(shown, labels=[show_bytes(size) for size in shown])
        axes.minorticks_off()
        axes.set_xlabel("size of the tensor (bytes)")
        axes.grid(alpha=0.25, linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    if limit:
        least_us = [limit.seconds(size) * 1e6 for size in sizes]
        bus_factor = rows[0].busbw_gb_per_s / rows[0].algbw_gb_per_s
        busbw = [size / us / 1e3 * bus_factor for size, us in zip(sizes, least_us, strict=True)]
        for axes, values in ((time_axes, least_us), (busbw_axes, busbw)):
            axes.plot(sizes, values, "--", color="0.45", linewidth=1.2, label="limit of the links", zorder=1)
    busbw_axes.set(title="Bus bandwidth", ylabel="busbw (GB/s)", ylim=(0, None))
    time_axes.legend(frameon=False, loc="upper left")
    figure.suptitle(title, fontsize=13)
    figure.supxlabel(caption, fontsize=8, color="0.35")
    with replacing_named(path) as file:
        figure.savefig(file, format=path.suffix[1:] or None, dpi=150)
