"""What the benchmarks of the input share: the spread of repetitions, the conditions, the file of figures."""

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from bigbatch.comm.conditions import source_commit

DISTRIBUTIONS = ("torch", "torchvision", "pillow", "numpy", "nvidia-dali-cuda130", "simplejpeg")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Number of repetitions, median, quartiles, smallest and largest, to six digits."""
    q1, _, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    figures = {"median": statistics.median(values), "min": min(values), "q1": q1, "q3": q3, "max": max(values)}
    return {"n": len(values)} | {name: float(f"{value:.6g}") for name, value in figures.items()}


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    """What another person needs to repeat it."""
    return {
        "commit": source_commit(),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: _version(name) for name in DISTRIBUTIONS},
        "load_average": os.getloadavg()[0],
        "options": {key: str(value) for key, value in vars(options).items() if key not in ("out", "measure")},
    }


def _cpu_name() -> str:
    """From the kernel, which knows it better than Python."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def show(name: str, values: Mapping[str, float], *, unit: str) -> str:
    """One line: median, smallest and largest."""
    shown = {key: f"{values[key]:,.4g}" if values[key] < 1000 else f"{values[key]:,.0f}" for key in values}
    return f"{name:32} {shown['median']:>10} {unit:18} ({shown['min']} to {shown['max']}, n = {values['n']})"


def write_record(record: Mapping[str, Any], path: Path | None) -> None:
    """To path, or where there is none to standard output."""
    text = json.dumps(record, indent=1) + "\n"
    if path is None:
        print(text, end="")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    print(f"written: {path}", file=sys.stderr)
