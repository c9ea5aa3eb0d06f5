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
"""Largest ratio of the comparisons, because a change must gain in each; the smallest one of ALTERNATIVES."""
ALTERNATIVES = {"settings"}
"""Prototypes whose comparisons are choices: a run takes the best."""
UNHURRIED_SECONDS = 600
SECONDS = {"settings": (100, 130)}
"""Prototype -> seconds that it is likely to take, and may take, if not 60 and 120: searches compile for long."""
USED = ("registers", "shared_bytes", "spilled_bytes")
EXPLAINED = """Pairs are today's kernels and the prototype's, at small shapes on a CPU. Launches and bytes are
calculated or read in lowered code; two_blocks and settings leave out convolutions. An error of 1 is half the
distance between neighbours of the value's dtype, at the value or at the rms of all. Triton's interpreter truncates
to bf16, which doubles it, so that some compare fp16, and sums one by one. A prototype can compare a kernel of another
change, too. Milliseconds are calculated, of a step of 256 images on an H200."""


def names() -> list[str]:
    """List the prototypes."""
    return sorted({path.stem for path in FOLDER.glob("*.py")} - {"__init__", "common"})


def seconds_of(name: str) -> tuple[int, int]:
    """Return the seconds that a prototype is likely to take, and may take."""
    return SECONDS.get(name, (60, 120))


def measure(context: Context, *, name: str) -> Found:
    """Compare a prototype's values, launches and bytes with today's, and on a GPU its time.

    Figures of comparisons that were done are kept if a later one fails, and those of wrong values are marked.
    """
    found, ratios = Found(), []
    seconds = UNHURRIED_SECONDS if context.is_small else seconds_of(name)[1] - 10  # the part itself starts and writes
    (head, *rows), why = lines_of(name, *(["--small"] if context.is_small else []), seconds=seconds)
    for row in rows:
        what = f"{row['name']}, WRONG" if row["wrong"] else row["name"]
        for value, (today, new) in row["roundings"].items():
            found.add(f"{what}: {value}, today", [today], unit="roundings")
            found.add(f"{what}: {value}, new", [new], unit="roundings")
        for value, share in row["equal"].items():
            found.add(f"{what}: {value}, equal to today's", [share], unit="share")
        for who, times in row.get("seconds", {}).items():
            found.keep(f"{what}: {who}", times, unit="s")
            found.add(f"{what}: {who}, share of the bound", [row["share_of_bound"][who]], unit="share")
        if "ratio" in row:
            found.keep(f"{what}: {RATIO}", row["ratio"], unit="ratio")
            if row["item"] == head["item"] and not row["wrong"]:
                ratios.append(row["ratio"]["median"])
    if ratios and (name in ALTERNATIVES or not why):
        found.add(RATIO, [(min if name in ALTERNATIVES else max)(ratios)], unit="ratio")
    if rows:
        found.tables["kernels"] = [shown(row) for row in rows]
    found.failure = why
    return found


def shown(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of the table."""
    counts = {key: row[key] for key in ("launches", "bytes_per_element")}
    pairs = {
        f"{key}, {who}": values[place] for key, values in counts.items() for place, who in enumerate(("today", "new"))
    }
    return {"comparison": row["name"], **pairs}


def lines_of(name: str, *options: str, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """Run a prototype; return what it printed of itself and of each comparison, and why it failed, or "".

    Raises: UserError if it failed before it printed anything.
    """
    command = [sys.executable, "-m", f"benchmarks.gpu.prototypes.{name}", *options]
    try:
        done = subprocess.run(command, capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        printed, why = error.stdout or b"", f"stopped after {seconds:g} s"
    else:
        last = (done.stderr.decode(errors="replace").strip() or "no output").splitlines()[-1]
        printed, why = done.stdout, last if done.returncode else ""
    why = why and f"prototypes/{name}: {why}"
    whole = printed.decode(errors="replace").rpartition("\n")[0].splitlines()
    lines = [json.loads(line) for line in whole if line.startswith("{")]
    if not lines:
        raise UserError(why or f"prototypes/{name}: no output")
    return lines, why


def main() -> None:
    """Write the values, launches and bytes of all prototypes at small shapes, and their kernels for an H200."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, help="file of the record (default: standard output)")
    options = parser.parse_args()
    facts = conditions(options)
    rows = [entry_of(name) for name in names()]
    write_record(options.out, {"benchmark": "gpu_prototypes", "conditions": facts, "prototypes": rows})
    if options.out:
        options.out.with_suffix(".md").write_text(page(rows))


def entry_of(name: str) -> dict[str, Any]:
    """Return the record of a prototype. Raises: UserError if it fails or a value is wrong."""
    (head, *comparisons), why = lines_of(name, "--small", seconds=UNHURRIED_SECONDS)
    (_, *kernels), why_not_compiled = lines_of(name, "--cubins", seconds=UNHURRIED_SECONDS)
    if why or why_not_compiled:
        raise UserError(why or why_not_compiled)
    return {**head, "comparisons": comparisons, "kernels": kernels}


def page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write tables of what is compared and of what is compiled; pairs are today's value and the prototype's."""
    compared, compiled = [], []
    for row in rows:
        least, most = row["expected_ms"]
        calculated = f"{least:g}" if least == most else f"{least:g} to {most:g}"
        for each in row["comparisons"]:
            errors = [max(pair[place] for pair in each["roundings"].values()) for place in (0, 1)]
            pairs = (each["launches"], each["bytes_per_element"], errors)
            shown = [", ".join(f"{value:.4g}" for value in pair) for pair in pairs]
            dtypes = ", ".join(dict.fromkeys(each["dtypes"].values()))
            expected = calculated if each["item"] == row["item"] else ""
            compared.append([str(each["item"]), row["name"], each["name"], dtypes, *shown, expected])
        for each in row["kernels"]:
            sizes = {key: value for key, value in each.items() if key not in ("kernel", *USED)}
            named = ", ".join(f"{key} {value}" for key, value in sizes.items())
            compiled.append([row["name"], each["kernel"], named, *(str(each[key]) for key in USED)])
    counted = ("launches", "bytes per element", "largest error")
    head = ("change", "prototype", "compared", "dtypes", *counted, "expected ms of a step of 38.0")
    parts = ["# Prototypes of kernels for a GPU", EXPLAINED, table(head, compared)]
    parts += ["Compiled for an H200:", table(("prototype", "kernel", "constants", *USED), compiled)]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    run(main)
