"""Does preflight find a node slowed by half, and a link at a tenth, and nothing on a healthy cluster?

    python -m benchmarks.preflight --out benchmarks/results/preflight.json

Four emulated nodes at 1 Gbit/s with a rank each take turns in three states: healthy; one node stopped for half of the
time, in slices of 5 ms; one node's link at 100 Mbit/s. Each trial draws its node. Needs what `bigbatch launch emulate`
needs.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from benchmarks.record import conditions, spread, write_record

NODES, LINK, SLOW_LINK = 4, "1gbit", "100mbit"
SLICE_SECONDS = 0.005
BIGBATCH = (sys.executable, "-m", "bigbatch", "launch", "emulate")


def main() -> int:
    """Run the trials; return 1 if one gave a wrong result."""
    options = parse()
    name = f"preflight-{os.getpid()}"
    run("up", "--name", name, "--nodes", str(NODES), "--link", LINK)
    draw = random.Random(options.seed)
    trials: list[dict[str, Any]] = []
    try:
        for number in range(options.trials):
            for fault in ("none", "slow node", "slow link"):
                trials.append(trial(name, fault, node=draw.randrange(NODES)) | {"number": number})
                print(f"{trials[-1]}", file=sys.stderr, flush=True)
    finally:
        run("down", "--name", name)
    record: dict[str, Any] = {
        "benchmark": "preflight",
        "conditions": conditions(options) | {"nodes": NODES, "link": LINK, "slow_link": SLOW_LINK},
        "results": {fault: summarise(trials, fault) for fault in ("none", "slow node", "slow link")},
        "trials": trials,
    }
    write_record(options.out, record)
    for fault, result in record["results"].items():
        print(f"{fault:10} right {result['right']} of {result['trials']}, {result['seconds']['median']:.1f} s")
    return int(any(each["right"] < each["trials"] for each in record["results"].values()))


def parse() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON file for the results")
    add("--trials", type=int, default=20, help="trials of each state (default: %(default)s)")
    add("--seed", type=int, default=0, help="seed of the drawn nodes (default: %(default)s)")
    return parser.parse_args()


def trial(cluster: str, fault: str, *, node: int) -> dict[str, Any]:
    """Run one preflight; return the nodes that it blamed, and whether that is right."""
    faults: dict[str, Callable[[], Any]] = {
        "none": nullcontext,
        "slow node": lambda: slowed(f"n{node}"),
        "slow link": lambda: bad_link(cluster, f"n{node}"),
    }
    with tempfile.TemporaryDirectory() as folder, faults[fault]():
        facts = Path(folder) / "facts.json"
        done = run("run", "--name", cluster, "--", "preflight", "--json", str(facts), check=False)
        if not facts.exists():
            raise SystemExit(f"preflight failed: {done.stdout}{done.stderr}")
        found = json.loads(facts.read_text())
    blamed = sorted({host for finding in found["findings"] for host in finding["hosts"]})
    expected = [] if fault == "none" else [f"n{node}"]
    right = blamed == expected and done.returncode == (4 if expected else 0)
    return {
        "fault": fault,
        "node": expected,
        "blamed": blamed,
        "right": right,
        "seconds": found["seconds"],
        "multiply_gflops": [each["multiply_gflops"] for each in found["nodes"]],
        "copy_gb_per_second": [each["copy_gb_per_second"] for each in found["nodes"]],
        "best_link_gbit_per_second": [8 * max(each["link_bytes_per_second"].values()) / 1e9 for each in found["nodes"]],
    }


def summarise(trials: list[dict[str, Any]], fault: str) -> dict[str, Any]:
    """Sum up the trials of one state."""
    own = [each for each in trials if each["fault"] == fault]
    return {
        "trials": len(own),
        "right": sum(each["right"] for each in own),
        "seconds": spread([each["seconds"] for each in own]),
    }


def run(*words: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    """Run `bigbatch launch emulate`."""
    return subprocess.run([*BIGBATCH, *words], capture_output=True, text=True, check=check, timeout=120)


@contextmanager
def bad_link(cluster: str, node: str) -> Iterator[None]:
    """Reduce one node's rate to a tenth within the block."""
    run("shape", "--name", cluster, "--node", node, "--link", SLOW_LINK)
    try:
        yield
    finally:
        run("shape", "--name", cluster, "--node", node, "--link", LINK)


@contextmanager
def slowed(node: str) -> Iterator[None]:
    """Stop the preflight's rank on a node, once there is one, for half of the time."""
    end = threading.Event()
    thread = threading.Thread(target=_stop_and_go, args=(node, end))
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _stop_and_go(node: str, end: threading.Event) -> None:
    process = None
    while process is None and not end.wait(0.05):
        process = find_rank(node)
    while process is not None and not end.is_set():
        try:
            os.kill(process, signal.SIGSTOP)
            time.sleep(SLICE_SECONDS)
            os.kill(process, signal.SIGCONT)
            time.sleep(SLICE_SECONDS)
        except ProcessLookupError:
            return


def find_rank(node: str) -> int | None:
    """Find the preflight on the emulated node of that name."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            is_launcher = b"mpirun" in words[0] or b"srun" in words[0] or b"launch" in words
            if b"preflight" in words and not is_launcher:
                variables = (folder / "environ").read_bytes().split(b"\0")
                number = node.removeprefix("n")
                if {f"OMPI_COMM_WORLD_RANK={number}".encode(), f"SLURMD_NODENAME={node}".encode()} & set(variables):
                    return int(folder.name)
    return None


if __name__ == "__main__":
    sys.exit(main())
