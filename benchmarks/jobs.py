"""Time from submitting a job to its first step, and from Slurm's signal to a job that trains again.

    python -m benchmarks.jobs --out benchmarks/results/jobs.json

Two emulated nodes with a rank each and a real Slurm; the model and data of the quick start. Each trial submits a job by
`bigbatch launch slurm`, signals it as Slurm does before a time limit once it has trained two steps, and lets it come
back from the queue. Cold: the machine has forgotten all files that it had read (drop_caches, which needs root).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.record import conditions, show, spread, write_record

BIGBATCH = (sys.executable, "-m", "bigbatch")
PATIENCE_SECONDS = 240
STAGES = {
    "the command returns": "submitted",
    "the job's script runs": "running",
    "ranks, data and model are ready": "ready",
    "the first step is done": "first step",
    "signal: checkpoint saved, ranks ended": "saved",
    "signal: the script runs again": "running again",
    "signal: ranks are ready again": "ready again",
    "signal: the next step is done": "next step",
}


def main() -> int:
    """Run the trials, cold and warm in turn."""
    options = parse()
    name = f"jobs-{os.getpid()}"
    record: dict[str, Any] = {"benchmark": "jobs", "conditions": conditions(options), "trials": []}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        run("data", "generate", str(folder / "shapes"))
        run("launch", "emulate", "up", "--name", name, "--nodes", "2", "--slurm")
        try:
            for number in range(options.trials):
                for state in options.states:
                    record["trials"].append({"state": state, **trial(name, folder / f"{state}-{number}", state=state)})
                    print(record["trials"][-1], file=sys.stderr, flush=True)
        finally:
            run("launch", "emulate", "down", "--name", name)
    record["results"] = {
        state: {
            stage: spread([each[stage] for each in record["trials"] if each["state"] == state])
            for stage in STAGES.values()
        }
        for state in options.states
    }
    write_record(options.out, record)
    for state, stages in record["results"].items():
        print(f"{state}, seconds")
        for words, stage in STAGES.items():
            print(show(words, stages[stage], unit="s"))
    return 0


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON file for the results")
    add("--trials", type=int, default=5, help="trials of each state (default: %(default)s)")
    add("--states", nargs="+", choices=("cold", "warm"), default=["cold", "warm"], help="default: both, in turn")
    return parser.parse_args()


def trial(cluster: str, folder: Path, *, state: str) -> dict[str, float]:
    """Measure the seconds of each stage, since submitting and since the signal."""
    folder.mkdir()
    metrics = folder / "run" / "metrics.jsonl"
    if state == "cold":
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
    submitted = time.time()
    job = login(
        *(cluster, folder, *BIGBATCH, "launch", "slurm", "--nodes", "2", "--ranks-per-node", "1", "--time", "30"),
        *("--", "train", "--config", "quickstart", "--data.root", str(folder.parent / "shapes")),
        *("--run.directory", str(folder / "run"), "--run.epochs", "50", "--run.log_every_steps", "1"),
    )
    returned = time.time()
    number = job.split()[1].rstrip(";")  # job 7; its output: ...
    job_log = next(iter(wait_for(lambda: list(folder.glob("logs/*.log")))))
    running = wait_for(lambda: "restart 0" in job_log.read_text() and time.time())
    first = wait_for(lambda: reports(metrics, "train")[1:] and reports(metrics, "train"))
    ready = reports(metrics, "start")[0]
    signalled = time.time()
    login(cluster, folder, "scancel", "--batch", "--signal=USR1", number)
    saved = wait_for(lambda: "back into the queue" in job_log.read_text() and time.time())
    known = len(reports(metrics, "train"))
    again = wait_for(lambda: "restart 1" in job_log.read_text() and time.time())
    following = wait_for(lambda: reports(metrics, "train")[known:])
    ready_again = reports(metrics, "start")[1]
    login(cluster, folder, "scancel", number)
    wait_for(lambda: number not in login(cluster, folder, "squeue", "--noheader", "--format=%i"))
    return {
        "submitted": returned - submitted,
        "running": running - submitted,
        "ready": ready - submitted,
        "first step": first[0] - submitted,
        "saved": saved - signalled,
        "running again": again - signalled,
        "ready again": ready_again - signalled,
        "next step": following[0] - signalled,
    }


def reports(metrics: Path, kind: str) -> list[float]:
    """Read when each record of a kind was written."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [each["time"] for each in map(json.loads, lines) if each["kind"] == kind]


def wait_for(look: Callable[[], Any]) -> Any:
    """Poll look() until its result is true; return that."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := look()):
        if time.monotonic() > deadline:
            raise SystemExit(f"the job came to nothing in {PATIENCE_SECONDS} s")
        time.sleep(0.02)
    return found


def login(cluster: str, folder: Path, *words: str) -> str:
    """Return the output of a command on the login node."""
    argv = [*BIGBATCH, "launch", "emulate", "exec", "--name", cluster, "--", *words]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=True, timeout=120).stdout


def run(*words: str) -> None:
    """Run `bigbatch`."""
    subprocess.run([*BIGBATCH, *words], check=True, stdout=subprocess.DEVNULL, timeout=300)


if __name__ == "__main__":
    sys.exit(main())
