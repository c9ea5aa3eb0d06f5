"""Write README's scaling figure and its record from a sweep: python -m benchmarks.scaling_figure runs/sweeps/scaling

Before it, run `bigbatch sweep scaling --predict emulated` on a quiet machine, at a clean commit. A doubtful or missing
point is refused.
"""

import json
import shutil
import sys
from pathlib import Path

from bigbatch.experiments.report.predictions import read_predictions

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "benchmarks/results/sweep-scaling-cpu.json"

NUM_POINTS = 12
"""Weak and strong scaling, two algorithms, three numbers of ranks."""


def main() -> int:
    folder = Path(sys.argv[1])
    report = json.loads((folder / "report/report.json").read_text())
    (points,) = report["sweeps"].values()
    if doubted := [
        f"{each['values']}, {each['ranks']} ranks: {each['in_doubt_for']}" for each in points if each["in_doubt_for"]
    ]:
        print("\n".join(doubted))
        return 1
    if {each["ranks"] for each in points} != {1, 2, 4} or len(points) != NUM_POINTS:
        print(f"{len(points)} of {NUM_POINTS} points have figures: repeat the sweep's command")
        return 1
    record = {
        "benchmark": "sweep scaling",
        "command": "bigbatch sweep scaling --predict emulated",
        "conditions": report["conditions"],
        "points": points,
        "predicted": {number: vars(each) for number, each in read_predictions(folder).items()},
    }
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    shutil.copyfile(folder / "report/efficiency.png", ROOT / "docs/scaling.png")
    for ranks in (2, 4):
        shares = [100 * each["efficiency"] for each in points if each["ranks"] == ranks]
        print(f"README: efficiency of {ranks} ranks is {min(shares):.1f} to {max(shares):.1f}%")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
