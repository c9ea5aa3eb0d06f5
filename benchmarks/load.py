"""Cost of large loads: many steps, images, points of a sweep, reports of a run; in seconds and memory.

    python -m benchmarks.load --out benchmarks/results/load.json

Each is a real command in a process of its own. Steps: a small network trains on generated tensors; memory, descriptors
and threads of the process are noted at every report, so that what grows shows. Images: what `train --dry-run` takes
to list them (names of a few files: what an image holds is not read). Points: `sweep --dry-run` of so many. Reports:
`report` of a run with so many bytes of them, and `train` of the same finished run.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import bigbatch
from benchmarks.arguments import at_least
from benchmarks.record import conditions, file_system, write_record
from bigbatch.trainer.datasets.generated import write_dataset

SMALL: dict[str, Any] = {
    "data.loader": "synthetic",
    "data.num_synthetic_samples": 1600,
    "data.image_size": 16,
    "data.num_threads": 1,
    "data.probe_seconds": 0,
    "model.options.width": 4,
    "batch.global_batch_size": 16,
    "batch.microbatch_size": 16,
    "batch.bn_span": 16,
    "schedule.warmup_epochs": 0,
    "run.checkpoint_every_steps": 0,
}
"""Quickstart, as small as possible."""
NUM_CLASSES = 1000
LOOK_SECONDS = 0.02
LINKS = 60_000
"""Names that a file may have; ext4 takes 65,000."""


def main() -> None:
    """Measure, print, write the record."""
    options = parse()
    facts = conditions(options)
    measures: dict[str, Callable[[Path], dict[str, Any]]] = {
        "steps": lambda folder: load_of_steps(folder, steps=options.steps),
        "pictures": lambda folder: load_of_pictures(folder, pictures=options.pictures),
        "points": lambda folder: load_of_points(folder, points=options.points),
        "reports": lambda folder: load_of_reports(folder, megabytes=options.megabytes),
    }
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        facts["file_system"] = file_system(Path(scratch))
        for name in options.loads or measures:
            folder = Path(scratch, name)
            folder.mkdir()
            found[name] = measures[name](folder)
            print(f"{name}: {json.dumps(found[name])}", file=sys.stderr)
    write_record(options.out, {"conditions": facts, "loads": found})


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.load", description=__doc__.partition("\n")[0])
    parser.add_argument("loads", nargs="*", metavar="LOAD", choices=("steps", "pictures", "points", "reports", []))
    parser.add_argument("--steps", type=at_least(100), default=50_000)
    parser.add_argument("--pictures", type=at_least(NUM_CLASSES), default=1_280_000)
    parser.add_argument("--points", type=at_least(1), default=10_000)
    parser.add_argument("--megabytes", type=at_least(1), default=1000, help="megabytes of reports")
    parser.add_argument("--scratch", type=Path, help="where the folders are made that are loaded")
    parser.add_argument("--out", type=Path, help="the file of figures (default: standard output)")
    return parser.parse_args()


def run(*command: str, folder: Path) -> dict[str, Any]:
    """Run a bigbatch command; return its seconds, and its peak memory. Raises: SystemExit if it fails."""
    start, peak = time.perf_counter(), 0
    with (folder / "output").open("a") as output:
        process = subprocess.Popen([sys.executable, "-m", "bigbatch", *command], stdout=output, stderr=output)
        while process.poll() is None:
            # not by getrusage, which counts the memory of this process when it forked
            with suppress(OSError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak = max([peak, *(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))])
            time.sleep(LOOK_SECONDS)
    seconds = time.perf_counter() - start
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{(folder / 'output').read_text()[-2000:]}")
    return {"seconds": seconds, "peak_megabytes": peak / 1e3}


def words(settings: dict[str, Any]) -> list[str]:
    """Write settings as options of a command."""
    return [f"--{key}={value}" for key, value in settings.items()]


def load_of_steps(folder: Path, *, steps: int) -> dict[str, Any]:
    """Train that many steps, 100 in an epoch, in this process; return its resources at a tenth and at the end."""
    torch.set_flush_denormal(True)  # denormals, with which CPUs take many times as long
    epochs = -(-steps // 100)
    held: list[dict[str, int]] = []
    start = time.perf_counter()
    settings = {
        **SMALL,
        "run.directory": folder / "run",
        "run.epochs": epochs,
        "run.eval_every_epochs": epochs,
        "run.log_every_steps": 10,
    }
    hooks = bigbatch.TrainingHooks(on_report=lambda record: held.append(what_is_held()))
    bigbatch.train("quickstart", settings, hooks=hooks, quiet=True)
    seconds = time.perf_counter() - start
    warm = held[len(held) // 10]
    return {"steps": 100 * epochs, "seconds": seconds, "at_a_tenth": warm, "at_the_end": held[-1]}


def what_is_held() -> dict[str, int]:
    """Return this process's memory, descriptors and threads now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_megabytes": pages * resource.getpagesize() // 10**6,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
    }


def load_of_pictures(folder: Path, *, pictures: int) -> dict[str, Any]:
    """List that many names in class folders."""
    write_dataset(folder / "few", train_per_class=1, val_per_class=1, side_pixels=(32, 36))
    source = next(folder.glob("few/train/*/*"))
    each = pictures // NUM_CLASSES
    for split, count in (("train", each), ("val", 1)):
        for label in range(NUM_CLASSES):
            place = folder / "data" / split / f"n{label:08d}"
            place.mkdir(parents=True)
            for number in range(count):
                if os.stat(source).st_nlink >= LINKS:
                    copy = folder / f"copy-{label}-{number}"
                    copy.write_bytes(source.read_bytes())
                    source = copy
                os.link(source, place / f"{number:06d}{source.suffix or '.jpg'}")
    settings = {
        "data.loader": "torchvision",
        "data.num_synthetic_samples": "null",
        "data.root": folder / "data",
        "data.num_classes": NUM_CLASSES,
        "run.directory": folder / "run",
    }
    found = run("train", "--config=quickstart", "--dry-run", *words(SMALL | settings), folder=folder)
    return {"pictures": each * NUM_CLASSES, **found}


def load_of_points(folder: Path, *, points: int) -> dict[str, Any]:
    """Plan a sweep of that many points."""
    file = {
        "name": "load",
        "config": "quickstart",
        # the others are the sweep's own
        "options": {key: value for key, value in SMALL.items() if key != "data.num_synthetic_samples"},
        "steps": 5,
        "where": "local",
        "launch": {},
        "ranks_per_node": 1,
        "seeds": 1,
        "timeout_minutes": 5,
        "grid": {"scaling": ["weak"], "ranks": [1], "run.seed": list(range(points))},
    }
    (folder / "load.yaml").write_text(json.dumps(file))  # JSON is YAML
    found = run("sweep", str(folder / "load.yaml"), "--dry-run", folder=folder)
    return {"points": points, **found}


def load_of_reports(folder: Path, *, megabytes: int) -> dict[str, Any]:
    """Read that many bytes of reports of a finished run: for its report, and when it is started again."""
    place = folder / "run"
    options = words(SMALL | {"run.epochs": 1, "run.log_every_steps": 5, "run.directory": place})
    run("train", "--config=quickstart", *options, folder=folder)
    metrics = place / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    report = next(number for number, line in enumerate(lines) if json.loads(line)["kind"] == "train")
    num_more = max(0, megabytes * 10**6 - metrics.stat().st_size) // len(lines[report])
    with metrics.open("w") as file:
        file.writelines(lines[: report + 1])
        for _ in range(num_more):
            file.write(lines[report])
        file.writelines(lines[report + 1 :])
    return {
        "reports": num_more + len(lines),
        "report": run("report", str(place), folder=folder),
        "train": run("train", "--config=quickstart", *options, folder=folder),
    }


if __name__ == "__main__":
    main()
