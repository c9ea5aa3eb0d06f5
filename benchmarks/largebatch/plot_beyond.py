"""Draw what beyond.py measured: accuracy by batch at equal steps and at equal time, with every seed.

python -m benchmarks.largebatch.plot_beyond benchmarks/results/beyond-shapes-short.json --out docs/optimizers.png
"""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

from benchmarks.largebatch.plot_ablations import by_batch, plot

COLOURS = {
    "lars": "tab:blue",
    "nesterov": "tab:orange",
    "lamb": "tab:green",
    "schedule-free": "tab:grey",
    "muon": "tab:red",
    "shampoo": "tab:purple",
}


def main() -> None:
    """Draw and write the picture."""
    plot(__doc__, "beyond.py", draw)


def draw(records: Sequence[dict[str, Any]]) -> Figure:
    """Draw two panels for each record."""
    figure = Figure(figsize=(11, 3.8 * len(records)), layout="constrained")
    for row, record in zip(figure.subplots(len(records), 2, squeeze=False, sharey="row"), records, strict=True):
        dataset = record["conditions"]["options"]["dataset"]
        ways = {"equal steps": record["cases"], "equal time": in_equal_time(record["cases"])}
        for axes, (way, found) in zip(row, ways.items(), strict=True):
            by_batch(axes, found, title=f"{dataset}: {way}, each tuned alike", colours=COLOURS)
        row[0].legend()
    return figure


def in_equal_time(found: dict[str, Any]) -> dict[str, Any]:
    """Put those of fewer epochs, where there are any, in the place of those of equal steps."""
    shorter = {(c["optimizer"], c["batch"]): {**c, "family": "batch"} for c in found.values() if c["family"] == "time"}
    plain = {name: case for name, case in found.items() if case["family"] == "batch"}
    return {name: shorter.get((case["optimizer"], case["batch"]), case) for name, case in plain.items()}


if __name__ == "__main__":
    main()
