"""Shared parts of the benchmarks: command lines, the spread of repetitions, conditions, the file of figures."""

import argparse
import json
import os
import platform
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from bigbatch.comm.tuning.commit import source_commit
from bigbatch.errors import UserError
from bigbatch.files import write_whole
from bigbatch.trainer.folder.folder import writing
from bigbatch.words import at_least as at_least

DISTRIBUTIONS = ("torch", "torchvision", "pillow", "numpy", "nvidia-dali-cuda130", "simplejpeg")


def run(main: Callable[[], None]) -> None:
    """End the process with one line for a user's error."""
    try:
        main()
    except UserError as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the number of repetitions, median, extremes and quartiles (of one value, that value)."""
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {"n": len(values), "median": median, "min": min(values), "q1": q1, "q3": q3, "max": max(values)}


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """Divide values[i] by others[i], round by round."""
    return [value / other for value, other in zip(values, others, strict=True)]


def show(name: str, values: Mapping[str, float], *, unit: str) -> str:
    """Write a spread in one line: median, smallest and largest."""
    shown = {key: f"{values[key]:,.4g}" if values[key] < 1000 else f"{values[key]:,.0f}" for key in values}
    return f"{name:32} {shown['median']:>10} {unit:18} ({shown['min']} to {shown['max']}, n = {values['n']})"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def conditions(options: argparse.Namespace) -> dict[str, Any]:
    """Return the facts needed to repeat a measurement. Call it before measuring, so that the load is that of others."""
    return {
        "commit": source_commit(),
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        **{name: version_of(name) for name in DISTRIBUTIONS},
        "load_average": os.getloadavg()[0],
        "options": {
            key: str(without_place(value)) for key, value in vars(options).items() if key not in ("out", "measure")
        },
    }


def without_place(value: Any) -> Any:
    """Return an option's value, where a path that is absolute or leaves the folder is cut to its last part.

    The other parts belong to one machine, and are not needed to repeat a measurement.
    """
    if isinstance(value, list | tuple):
        return type(value)(map(without_place, value))
    if not isinstance(value, str | Path):
        return value
    text = str(value)
    option, equals, path = text.partition("=") if text.startswith("--") else ("", "", text)
    is_elsewhere = Path(path).is_absolute() or ".." in Path(path).parts
    return f"{option}{equals}{Path(path).name}" if is_elsewhere else value


def cpu_name() -> str:
    """Return the CPU's model as Linux reports it, else its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def version_of(distribution: str) -> str | None:
    """Return an installed version; None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def write_record(path: Path | None, record: Mapping[str, Any]) -> None:
    """Replace the file in one step; without a path write to standard output. Raises: RunFolderError."""
    text = show_record(record) + "\n"
    if path is None:
        sys.stdout.write(text)
        return
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode())


def show_record(record: Mapping[str, Any]) -> str:
    """Write JSON with a line per fact: numbers to six digits, and lists of numbers on one line."""
    text = json.dumps(_rounded(record), indent=1)
    return re.sub(r"\[[-+.\deE,\s]+\]", lambda match: " ".join(match[0].split()), text)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, Mapping):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value
