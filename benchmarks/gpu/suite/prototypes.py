"""The prototypes as cases: each in a process of its own, because Triton interprets or compiles for a whole process.

python -m benchmarks.gpu.suite.prototypes --out benchmarks/results/prototypes-cpu.json  # values of all, on a CPU
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.suite.context import Context, Found
from benchmarks.record import conditions, run, table, write_record
from bigbatch.errors import UserError

FOLDER = Path(__file__).parents[1] / "prototypes"
RATIO = "new / today"
SECONDS = {"settings": (150, 400)}
"""Prototype -> seconds that it is likely to take, and may take, if not 60 and 120: searches compile for long."""
USED = ("registers", "shared_bytes", "spilled_bytes")
EXPLAINED = """Pairs are today's kernels and the prototype's, at small shapes on a CPU. Launches and bytes are
calculated or read in lowered code; two_blocks and settings leave out convolutions. An error of 1 is half the
distance between neighbours of the value's dtype, at the value or at the rms of all. Triton's interpreter truncates
to bf16, which doubles it, and sums one by one. Milliseconds are calculated, of a step of 256 images on an H200."""


def names() -> list[str]:
    """List the prototypes."""
    return sorted({path.stem for path in FOLDER.glob("*.py")} - {"__init__", "common"})


def measure(context: Context, *, name: str) -> Found:
    """Compare a prototype's values, launches and bytes with today's, and on a GPU its time."""
    found = Found()
    line = line_of(name, *(["--small"] if context.is_small else []))
    for row in line["comparisons"]:
        for value, (today, new) in row["roundings"].items():
            found.add(f"{row['name']}: {value}, today", [today], unit="roundings")
            found.add(f"{row['name']}: {value}, new", [new], unit="roundings")
        for who, seconds in row.get("seconds", {}).items():
            found.keep(f"{row['name']}: {who}", seconds, unit="s")
            found.add(f"{row['name']}: {who}, share of the bound", [row["share_of_bound"][who]], unit="share")
    sums = [
        sum(row["seconds"][who]["median"] for row in line["comparisons"] if "seconds" in row)
        for who in ("today", "new")
    ]
    if sums[0]:
        found.add(RATIO, [sums[1] / sums[0]], unit="ratio")
    found.tables["kernels"] = [shown(row) for row in line["comparisons"]]
    return found


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the table."""
    counts = {key: row[key] for key in ("launches", "bytes_per_element")}
    pairs = {
        f"{key}, {who}": values[place] for key, values in counts.items() for place, who in enumerate(("today", "new"))
    }
    return {"comparison": row["name"], **pairs}


def line_of(name: str, *options: str) -> dict[str, Any]:
    """Run a prototype; return what it prints. Raises: UserError if it fails or a value is wrong."""
    command = [sys.executable, "-m", f"benchmarks.gpu.prototypes.{name}", *options]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"prototypes/{name}: {(done.stderr.strip() or 'no output').splitlines()[-1]}")
    line: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return line


def main() -> None:
    """Write the values, launches and bytes of all prototypes at small shapes, and their kernels for an H200."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, help="file of the record (default: standard output)")
    options = parser.parse_args()
    facts = conditions(options)
    rows = [line_of(name, "--small") | line_of(name, "--cubins") for name in names()]
    write_record(options.out, {"benchmark": "gpu_prototypes", "conditions": facts, "prototypes": rows})
    if options.out:
        options.out.with_suffix(".md").write_text(page(rows))


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write tables of what is compared and of what is compiled; pairs are today's value and the prototype's."""
    compared, compiled = [], []
    for row in rows:
        least, most = row["expected_ms"]
        expected = f"{least:g}" if least == most else f"{least:g} to {most:g}"
        for each in row["comparisons"]:
            errors = [max(pair[place] for pair in each["roundings"].values()) for place in (0, 1)]
            pairs = (each["launches"], each["bytes_per_element"], errors)
            shown = [", ".join(f"{value:.4g}" for value in pair) for pair in pairs]
            compared.append([row["prototype"], each["name"], *shown, expected])
        for each in row["kernels"]:
            sizes = {key: value for key, value in each.items() if key not in ("kernel", *USED)}
            named = ", ".join(f"{key} {value}" for key, value in sizes.items())
            compiled.append([row["prototype"], each["kernel"], named, *(str(each[key]) for key in USED)])
    head = ("prototype", "compared", "launches", "bytes per element", "largest error", "expected ms of a step of 38.0")
    parts = ["# Prototypes of kernels for a GPU", EXPLAINED, table(head, compared)]
    parts += ["Compiled for an H200:", table(("prototype", "kernel", "constants", *USED), compiled)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    run(main)
