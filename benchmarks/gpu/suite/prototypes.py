"""The prototypes as cases: each in a process of its own, because Triton interprets or compiles for a whole process.

python -m benchmarks.gpu.suite.prototypes --out benchmarks/results/prototypes-cpu.json  # values of all, on a CPU
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.suite.context import Context, Found
from benchmarks.record import conditions, run, write_record
from bigbatch.errors import UserError

FOLDER = Path(__file__).parents[1] / "prototypes"
RATIO = "new / today"


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


if __name__ == "__main__":
    run(main)
