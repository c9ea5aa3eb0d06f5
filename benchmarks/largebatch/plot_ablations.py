"""Draw what ablations.py measured: accuracy by batch and by ablation with every seed, and the loss curves.

python -m benchmarks.largebatch.plot_ablations benchmarks/results/ablations-cifar10-short.json --out docs/ablations.png
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.largebatch.ablation_results import ended

COLOURS = {"lars": "tab:blue", "nesterov": "tab:orange", "sgd": "tab:green"}


def main() -> None:
    """Draw and write the picture."""
    plot(__doc__, "ablations.py", draw)


def plot(text: str | None, benchmark: str, draw: Callable[[Sequence[dict[str, Any]]], Figure]) -> None:
    """Draw the records of a benchmark that the command line names, and write the picture."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+", help=f"results of {benchmark}, a row of the picture each")
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    options = parser.parse_args()
    records = [json.loads(path.read_text()) for path in options.records]
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(records).savefig(options.out, dpi=120)


def draw(records: Sequence[dict[str, Any]]) -> Figure:
    """Draw three panels for each record."""
    figure = Figure(figsize=(13, 3.8 * len(records)), layout="constrained")
    for row, record in zip(figure.subplots(len(records), 3, squeeze=False), records, strict=True):
        dataset = record["conditions"]["options"]["dataset"]
        by_batch(row[0], record["cases"], title=f"{dataset}: equal epochs, each tuned alike")
        row[0].legend()
        others(row[1], record["cases"])
        losses(row[2], record["cases"])
    return figure


def by_batch(axes: Axes, found: dict[str, Any], *, title: str, colours: Mapping[str, str] = COLOURS) -> None:
    """Draw the mean over seeds by batch, a line per optimizer, a dot per run; crosses where some diverged."""
    for place, (optimizer, colour) in enumerate(colours.items()):
        cases = [c for c in found.values() if c["family"] == "batch" and c["optimizer"] == optimizer]
        for case in cases:
            mark_incomplete(axes, case, colour=colour, place=place)
        if not cases:
            continue
        rows = [c for c in cases if c["top1_percent"]["mean"] is not None]
        axes.plot([c["batch"] for c in rows], [c["top1_percent"]["mean"] for c in rows], color=colour, label=optimizer)
        dots = [(c["batch"], 100 * run["top1"]) for c in rows for run in c["runs"] if run["top1"] is not None]
        axes.scatter([x for x, _ in dots], [y for _, y in dots], color=colour, s=14)
    axes.set_xscale("log", base=2)
    batches = sorted({case["batch"] for case in found.values() if case["family"] == "batch"})
    axes.set_xticks(batches, [f"{batch:,}" for batch in batches])
    axes.set(xlabel="global batch", ylabel="correct (%)", title=title)


def mark_incomplete(axes: Axes, case: dict[str, Any], *, colour: str, place: int) -> None:
    """Mark "2 of 3 ended" by a cross at the mean where runs diverged; at the foot, in a line a place, where all did."""
    if not case["diverged"]:
        return
    mean = case["top1_percent"]["mean"]
    if mean is None:
        foot: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "color": colour, "fontsize": 8}
        axes.text(case["batch"], 0.02 + 0.06 * place, f"{case['optimizer']}: {ended(case)}", **foot)
        return
    axes.scatter([case["batch"]], [mean], color=colour, marker="x", s=80)
    axes.annotate(ended(case), (case["batch"], mean), (6, 6), textcoords="offset points", color=colour, fontsize=8)


def others(axes: Axes, found: dict[str, Any]) -> None:
    """Draw each case of the other ablations, a dot for each run."""
    names = [name for name, case in found.items() if case["family"] != "batch"]
    for place, name in enumerate(names):
        values = [100 * run["top1"] for run in found[name]["runs"] if run["top1"] is not None]
        axes.scatter(values, [place] * len(values), color=COLOURS[found[name]["optimizer"]], s=20)
    notes = [f", {ended(found[name])}" if found[name]["diverged"] else "" for name in names]
    labels = [f"{name}\n(batch {found[name]['batch']}{note})" for name, note in zip(names, notes, strict=True)]
    axes.set_yticks(range(len(names)), labels)
    axes.set(xlabel="correct (%)", title="Decay and precision", ylim=(-0.5, len(names) - 0.5))
    axes.invert_yaxis()


def losses(axes: Axes, found: dict[str, Any]) -> None:
    """Draw the training loss of the first seed at the largest batch."""
    largest = max(case["batch"] for case in found.values())
    for case in found.values():
        if case["family"] == "batch" and case["batch"] == largest:
            curve = case["runs"][0]["loss_curve"]
            axes.plot(curve["epoch"], curve["loss"], color=COLOURS[case["optimizer"]], label=case["optimizer"])
    axes.set(xlabel="epoch", ylabel="cross-entropy (nats)", title=f"Training loss, batch {largest}, first seed")
    axes.legend()


if __name__ == "__main__":
    main()
