"""Plot the results of decode.py: images a second and core of each contestant, with the quartiles.

python -m benchmarks.input.plot benchmarks/results/input-decode-1core.json --out docs/input.png
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

LABELS = {
    "our_dali": "bigbatch, dali",
    "our_dali_at_256": "bigbatch, dali, stored at 256",
    "our_pillow": "bigbatch, torchvision",
    "bare_dali": "DALI alone",
    "torchvision": "torchvision's recipe",
    "simplejpeg": "simplejpeg, scaled decoding",
    "limit_pillow_whole_picture": "limit: decoding alone, whole images",
    "limit_yuv_at_256": "limit: crop and resize of YUV at 256",
}


def main() -> None:
    """Draw and write the image."""
    options = parse()
    record = json.loads(options.record.read_text())
    options.out.parent.mkdir(parents=True, exist_ok=True)
    draw(record).savefig(options.out, dpi=120)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="result of decode.py")
    parser.add_argument("--out", type=Path, required=True, help="PNG file to write")
    return parser.parse_args(argv)


def draw(record: dict[str, Any]) -> Figure:
    """Draw a bar for each contestant, the fastest on top."""
    rates = record["images_per_second_per_core"]
    names = sorted(rates, key=lambda name: rates[name]["median"])
    medians = [rates[name]["median"] for name in names]
    errors = [[abs(rates[name]["median"] - rates[name][end]) for name in names] for end in ("q1", "q3")]
    colours = ["tab:blue" if name.startswith("our") else "0.8" if "limit" in name else "0.55" for name in names]
    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh([LABELS[name] for name in names], medians, xerr=errors, color=colours, capsize=3)
    axes.bar_label(bars, [f"{median:,.0f}" for median in medians], padding=6)
    size, facts = record["conditions"]["options"]["image_size"], record["conditions"]
    axes.set(
        xlabel=f"images a second and core, decoded and randomly cropped to {size} x {size}",
        xlim=(0, 1.15 * max(medians)),
        title=f"ImageNet images on a CPU ({facts['cpu']}, n = {rates[names[0]]['n']})",
    )
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    main()
