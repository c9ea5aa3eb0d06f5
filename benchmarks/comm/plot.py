"""Draw what run.py measured: the share of the links' limit by size, and the gradients of whole networks.

python -m benchmarks.comm.plot benchmarks/results --out docs/comm.png
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.comm.summary import read_records
from benchmarks.comm.targets import Record, median, show_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = {
    # contestant: (label, colour, marker, line width); colours of Okabe and Ito, for colour-blind readers
    "hybrid": ("bigbatch hybrid", "#0072B2", "o", 2.6),
    "hierarchical": ("hierarchical", "#56B4E9", "s", 1.2),
    "sharded": ("sharded", "#56B4E9", "D", 1.2),
    "ring": ("ring", "#56B4E9", "^", 1.2),
    "doubling": ("doubling", "#56B4E9", "v", 1.2),
    "native": ("direct", "#56B4E9", "P", 1.2),
    "gloo": ("gloo (DDP's)", "#D55E00", "o", 1.8),
    "mpi": ("Open MPI", "#CC79A7", "s", 1.8),
    "horovod": ("Horovod", "#E69F00", "D", 1.8),
}
BARS = {
    "ours fp16": ("bigbatch, fp16 wire", "#0072B2"),
    "ours tuned": ("bigbatch", "#56B4E9"),
    "ddp": ("DDP, gloo", "#D55E00"),
    "horovod": ("Horovod, MPI", "#E69F00"),
}
EXCHANGES = ("exchange-4x2-200mbit", "exchange-4x2-1gbit")
MODELS = {"resnet50": "ResNet-50", "alexnet_bn": "AlexNet-BN"}
INK = "0.25"


def main() -> int:
    """Read the records, write the image."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="with the records of run.py")
    parser.add_argument("--out", type=Path, default=Path("docs/comm.png"), help="(default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="plot the records of run.py --quick")
    options = parser.parse_args()
    records = read_records(options.folder, quick=options.quick)
    exchanges = [records[name] for name in EXCHANGES if name in records]
    sets = chosen_sets(records)
    if not exchanges and not sets:
        parser.error(f"{options.folder}: no records of {', '.join(EXCHANGES)} or of gradients; run.py makes them")
    draw(exchanges, sets, options.out)
    print(f"written: {options.out}", file=sys.stderr)
    return 0


def chosen_sets(records: Mapping[str, Record]) -> dict[str, Record]:
    """Choose gradient sets, label -> record: the networks in order, block before cyclic placement, fast link first."""
    found = {}
    for model, title in MODELS.items():
        for link, rate in (("1gbit", "1 Gbit/s"), ("200mbit", "200 Mbit/s")):
            for place in ("", "-cyclic"):
                record = records.get(f"gradients-{model}-{link}{place}")
                if record:
                    label = f"{title}, {record['num_bytes'] / 1e6:.0f} MB\n{rate}"
                    found[label + (", cyclic ranks" if place else "")] = record
    return found


def draw(exchanges: Sequence[Record], sets: Mapping[str, Record], path: Path) -> None:
    """Draw shares side by side, bars below."""
    from matplotlib.figure import Figure

    num_rows = bool(exchanges) + bool(sets)
    figure = Figure(figsize=(12, 4.6 * num_rows), layout="constrained")
    grid = figure.add_gridspec(num_rows, max(1, len(exchanges)), hspace=0.08)
    if exchanges:
        panels = [figure.add_subplot(grid[0, i]) for i in range(len(exchanges))]
        for axes, record in zip(panels, exchanges, strict=True):
            draw_shares(axes, record)
        panels[0].set_ylabel("share of what the links allow")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles[::-1], labels[::-1], loc="outside upper center", ncols=9, frameon=False, fontsize=9)
    if sets:
        draw_bars(figure.add_subplot(grid[-1, :]), sets)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140, facecolor="white")


def draw_shares(axes: "Axes", record: Record) -> None:
    """Draw one link rate: a line per contestant, fp32 wire; without those that had time for one sum only."""
    rows = [row for row in record["rows"] if row["seconds"]["n"] > 1 and row["limit_share"] is not None]
    for name in reversed(STYLES):
        mine = [row for row in rows if row["contestant"] == name]
        if mine:
            label, color, marker, width = STYLES[name]
            axes.plot(
                [row["size"] for row in mine],
                [row["limit_share"] for row in mine],
                color=color,
                marker=marker,
                markersize=2.2 + 2 * width**0.5,
                linewidth=width,
                alpha=1.0 if width > 1.5 else 0.75,
                label=label,
                zorder=3 if name == "hybrid" else 2,
            )
    axes.axhline(1, color=INK, linestyle="--", linewidth=1)
    sizes = sorted({row["size"] for row in rows})
    shown = far_apart(sizes)
    axes.set_xscale("log")
    axes.set_xticks(shown, labels=[show_size(size) for size in shown])
    axes.minorticks_off()
    axes.set(ylim=(0, 1.08), xlabel="size of the all-reduce")
    rates = {"200mbit": "200 Mbit/s", "1gbit": "1 Gbit/s"}
    setting = record["conditions"]["setting"]
    link = rates.get(setting.get("link", ""), setting.get("link", "links"))
    axes.set_title(f"All-reduce by size: 4 nodes x 2 ranks, {link}", fontsize=11, color=INK, loc="left")
    dress(axes, "y")


def far_apart(sizes: Sequence[int]) -> list[int]:
    """Keep sizes with labels that do not touch: about a factor of ten from each to the next."""
    shown = list(sizes[:1])
    for size in sizes:
        if size > 8 * shown[-1]:
            shown.append(size)
    return shown


def draw_bars(axes: "Axes", sets: Mapping[str, Record]) -> None:
    """Draw each network's seconds as multiples of bigbatch's in fp32; the limit of the links as a tick."""
    height = 0.2
    for place, record in enumerate(sets.values()):
        rows = {row["contestant"]: row for row in record["rows"]}
        names = [name for name in BARS if name in rows]
        for i, name in enumerate(names):
            row = rows[name]
            y = place + (i - (len(names) - 1) / 2) * height
            value, error = relative(row, rows), relative_spread(row, rows)
            axes.barh(y, value, height * 0.88, color=BARS[name][1], label=BARS[name][0] if place == 0 else None)
            axes.plot(error, (y, y), color=INK, linewidth=1.2, solid_capstyle="butt")
            axes.text(max(value, error[1]) + 0.02, y, f"{median(row):.2f} s", va="center", fontsize=8.5, color=INK)
        if record["limit_seconds"]:
            limit = record["limit_seconds"] / median(rows["ours tuned"])
            span = (place - len(names) / 2 * height, place + len(names) / 2 * height)
            axes.plot((limit, limit), span, color=INK, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(sets)), labels=list(sets), fontsize=9)
    axes.invert_yaxis()
    axes.set(xlabel="time of all gradients ÷ bigbatch's at fp32 (dashed: what the links allow at fp32)", xlim=(0, None))
    axes.margins(x=0.1)
    axes.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 1), ncols=4, labelcolor=INK)
    axes.set_title("Gradients of a whole network, from the start of backward", fontsize=11, color=INK, loc="left")
    dress(axes, "x")


def relative(row: Record, rows: Mapping[str, Record]) -> float:
    """Divide median seconds by ours at fp32."""
    return median(row) / median(rows["ours tuned"])


def relative_spread(row: Record, rows: Mapping[str, Record]) -> tuple[float, float]:
    """Return the spread from the quickest to the slowest repetition."""
    unit = median(rows["ours tuned"])
    return row["seconds"]["min"] / unit, row["seconds"]["max"] / unit


def dress(axes: "Axes", grid: str) -> None:
    """Draw a light grid and no box."""
    axes.grid(axis=grid, alpha=0.25, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("0.6")
    axes.tick_params(colors=INK)


if __name__ == "__main__":
    sys.exit(main())
