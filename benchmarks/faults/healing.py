"""Trials of healing in place: how long a killed or stopped rank delays its job, and whether images and bits stay.

    python -m benchmarks.faults.healing --trials 50 --out benchmarks/results/healing-trials.json

Jobs of 4 ranks on emulated nodes, which need what `bigbatch launch emulate` needs, train a tiny ResNet-9 reproducibly.
Each job loses up to 3 ranks, at drawn moments, and each loss is a trial. Its time: from the signal to the first report
of a step by the ranks that are left, less the median time of their later steps; after --signal stop it includes
--timeout-seconds. All records of images, weights and optimizer state are compared with those of an undisturbed run.
"""

import argparse
import json
import math
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.faults.effective import START_SECONDS, Method, ended_job, find_rank, look_at_run
from benchmarks.record import at_least, conditions, run, write_record
from bigbatch.errors import UserError
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.folder.folder import RunDir, read_records

BATCH, LOSSES = 24, 3
STEPS = 10
"""Steps of an epoch: a rank is lost in each epoch except the first."""
MOMENT_SECONDS = 0.1
"""Longest time from a report to a strike: about a step."""
LOOK_SECONDS = 0.01
LAYOUTS = {"4x1": (4, 1), "2x2": (2, 2)}
"""Nodes, and ranks of each."""
SETTINGS: dict[str, object] = {
    "run.heal": "in_place",
    "run.reproducible": "true",
    "run.loggers": "[]",
    "run.log_every_steps": 1,
    "run.digest_every_steps": 1,
    "run.epochs": LOSSES + 1,
    "run.eval_every_epochs": LOSSES + 1,
    "data.loader": "torchvision",
    "data.image_size": 32,
    "data.probe_seconds": 0,
    "model.options.width": 4,
    "batch.global_batch_size": BATCH,
    "batch.microbatch_size": 2,
    "batch.bn_span": 2,
    "comm.algorithm": "hierarchical",
}
KEPT = ("positions", "images", "weights and state")
"""Digests in the record of a step: of its images, and of weights and state after it."""


def main() -> None:
    options = parse()
    found: dict[str, Any] = {}
    record = {"benchmark": "healing", "conditions": conditions(options), "layouts": found}
    draw = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        write_dataset(data, train_per_class=STEPS * BATCH // 10, val_per_class=2, side_pixels=(36, 48))
        subprocess.run([sys.executable, "-m", "bigbatch", *train(data, Path(name), options), "--quiet"], check=True)
        expected = by_step(read_records(RunDir(Path(name) / "run").metrics))
        for layout in options.layout or LAYOUTS:
            trials: list[dict[str, Any]] = []
            while left := options.trials - len(trials):
                with tempfile.TemporaryDirectory() as folder:
                    strikes = strike_all(data, Path(folder), options, draw, layout=layout, number=min(left, LOSSES))
                    trials += judge(strikes, list(read_records(RunDir(Path(folder) / "run").metrics)), expected)
                print(f"{layout}: {trials[-1]}", file=sys.stderr, flush=True)
            found[layout] = summary(trials) | {"trials": trials}
            print(f"{layout}: {json.dumps(summary(trials))}", flush=True)
    write_record(options.out, record)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=at_least(1), default=50, help="of each layout")
    parser.add_argument("--layout", action="append", choices=LAYOUTS, help="nodes x ranks of each (all)")
    parser.add_argument("--signal", choices=("kill", "stop"), default="kill")
    parser.add_argument("--timeout-seconds", type=at_least(2), default=10, help="after which a stopped rank is lost")
    parser.add_argument("--seed", type=at_least(0), default=1, help="seed of the moments and the ranks")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: standard output)")
    return parser.parse_args(argv)


def train(data: Path, folder: Path, options: argparse.Namespace) -> list[str]:
    """Return the arguments of bigbatch for a run in this folder."""
    seconds = options.timeout_seconds
    settings = {"data.root": data, "run.directory": folder / "run", "comm.timeout_seconds": seconds}
    settings |= {"comm.warn_seconds": seconds / 2, "data.patience_seconds": seconds / 4}
    return ["train", "--config", "quickstart", *(f"--{key}={value}" for key, value in (SETTINGS | settings).items())]


def by_step(records: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the digests of a run's steps."""
    return {each["step"]: each for each in records if each["kind"] == "digests"}


def strike_all(
    data: Path, folder: Path, options: argparse.Namespace, draw: random.Random, *, layout: str, number: int
) -> list[dict[str, Any]]:
    """Start a job, kill or stop number ranks, and wait for its last step; return times, ranks and last steps.

    Raises: UserError if the job does not begin.
    """
    nodes, each = LAYOUTS[layout]
    argv = [sys.executable, "-m", "bigbatch", "launch", "emulate", "run", "--launcher", "plain"]
    argv += ["--nodes", f"{nodes}", "--ranks-per-node", f"{each}", "--", *train(data, folder, options)]
    method, mark = Method("", lambda folder: argv, look_at_run), uuid.uuid4().hex
    due = [STEPS * epoch + draw.randrange(STEPS // 2) for epoch in range(1, number + 1)]
    ranks, strikes = draw.sample(range(nodes * each), number), list[dict[str, Any]]()
    with (folder / "output").open("w") as output, ended_job(method, folder, mark, output) as job:
        deadline, step = time.time() + START_SECONDS, 0.0
        while job.poll() is None and time.time() < deadline and step < STEPS * (LOSSES + 1):
            _, step = look_at_run(folder) or (0.0, 0.0)
            if len(strikes) < number and step >= due[len(strikes)]:
                rank, deadline = ranks[len(strikes)], time.time() + START_SECONDS
                process = find_rank(mark, rank)
                assert process is not None
                time.sleep(MOMENT_SECONDS * draw.random())
                process.send_signal(signal.SIGKILL if options.signal == "kill" else signal.SIGSTOP)
                now = time.time()
                strikes.append({"rank": rank, "time": now, "step": (look_at_run(folder) or (0.0, step))[1]})
            time.sleep(LOOK_SECONDS)
    if not strikes:
        raise UserError(f"the job ended, or took no step: {(folder / 'output').read_text()[-2000:]}")
    return strikes


def judge(strikes: Sequence[dict[str, Any]], records: Sequence[dict[str, Any]], expected: Any) -> list[dict[str, Any]]:
    """Return the trials: what each strike cost, and whether the steps up to the next one are those of expected.

    The record of the step with the kill may be missing; the weights after the next step prove that it was done.
    """
    digests, trials = by_step(records), []
    for strike, later in pairwise([*strikes, {"time": float("inf"), "step": max(expected)}]):
        after = [each for each in records if strike["time"] <= each["time"] < later["time"]]
        healed = next((i for i, each in enumerate(after) if each.get("hint", "").startswith("lost: ")), len(after))
        reports = [each["time"] for each in after[healed:] if each["kind"] == "train"]
        trial = {"rank": strike["rank"], "seconds": None, "steps_lost": None, "is_equal": False}
        if len(reports) > 1:
            step_seconds = statistics.median(late - early for early, late in pairwise(reports))
            trial |= {"seconds": reports[0] - strike["time"] - step_seconds, "step_seconds": step_seconds}
            trial["steps_lost"] = max(0, strike["step"] - after[healed]["step"])
            steps = [step for step in expected if strike["step"] < step <= later["step"]]
            made = [step for step in steps if step in digests]
            trial["is_equal"] = all(digests[step][key] == expected[step][key] for step in made for key in KEPT) and (
                len(made) >= len(steps) - 1 and steps[-1] in made
            )
        trials.append(trial)
    return trials


def summary(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of a layout's trials; a trial without a step after it counts as not equal."""
    seconds = sorted(each["seconds"] for each in trials if each["seconds"] is not None)
    return {
        "n": len(trials),
        "healed": len(seconds),
        "equal": sum(each["is_equal"] for each in trials),
        "steps_lost": sum(each["steps_lost"] or 0 for each in trials),
        "median_seconds": statistics.median(seconds) if seconds else None,
        "percentile_95_seconds": seconds[math.ceil(0.95 * len(seconds)) - 1] if seconds else None,
        "max_seconds": max(seconds, default=None),
    }


if __name__ == "__main__":
    run(main)
