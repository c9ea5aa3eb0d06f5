"""Held-out perplexity and CPU time of examples/language_model.py on one thread; each call adds its runs to the record.

python -m benchmarks.language_model --cells lstm --seeds 1 2 3 --out benchmarks/results/language-model.json
python -m benchmarks.language_model --cells elman gru --out benchmarks/results/language-model.json
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.record import at_least, conditions, run, write_record

COMMAND = "python examples/language_model.py --cell CELL --epochs EPOCHS --learning-rate RATE --seed SEED"


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cells", nargs="+", choices=("elman", "gru", "lstm"), default=["elman", "gru", "lstm"])
    add("--seeds", nargs="+", type=int, default=[1])
    add("--epochs", type=at_least(1), default=4)
    add("--learning-rate", type=float, default=0.03)
    add("--text", default="examples/text/frankenstein.txt")
    add("--out", type=Path, help="JSON file of the record")
    options = parser.parse_args(argv)
    record: dict[str, Any] = {"command": COMMAND, "runs": []}
    if options.out and options.out.exists():
        record = json.loads(options.out.read_text())
    for cell in options.cells:
        for seed in options.seeds:
            record["runs"].append(measure(cell, seed, options))
            if options.out:
                write_record(options.out, record)


def measure(cell: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Run the example in a process of its own."""
    facts = conditions(options)
    chosen = {"cell": cell, "epochs": options.epochs, "learning-rate": options.learning_rate, "seed": seed}
    words = [f"--{name}={value}" for name, value in (chosen | {"text": options.text}).items()]
    before = cpu_seconds()
    command = [sys.executable, "examples/language_model.py", *words]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}  # so that its CPU time is the same on a busy machine
    printed = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True).stdout
    held_out = [float(value) for value in re.findall(r"training, ([\d.]+) held out", printed)]
    print(chosen, min(held_out), held_out[-1], flush=True)
    best = {"best": min(held_out), "best_epoch": held_out.index(min(held_out)) + 1, "last": held_out[-1]}
    return {**chosen, **best, "held_out": held_out, "cpu_seconds": cpu_seconds() - before, "conditions": facts}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    run(main)
