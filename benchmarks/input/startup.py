"""Seconds and memory that the list of a data set costs at the start of a run, on a made tree of empty files.

    python benchmarks/input/startup.py --out benchmarks/results/input-startup.json
    python benchmarks/input/startup.py --num 100000

Every repetition is a fresh process that lists 1,000 class folders. The tree was written just before, so its folders
are in the kernel's cache: a cold file system, or one over a network, takes longer.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NUM_CLASSES = 1000
IMAGENET_PICTURES = 1_281_167


def main() -> None:
    """Build the tree, measure, remove it, write the record."""
    options = parse()
    if options.measure:
        print(json.dumps(measure_here(options.measure)))
        return
    with tempfile.TemporaryDirectory(prefix="bigbatch-startup-", dir=options.scratch) as root:
        start = time.perf_counter()
        build_tree(Path(root), num_pictures=options.num)
        print(f"{options.num:,} files made in {time.perf_counter() - start:.1f} s", file=sys.stderr)
        runs = [measure_fresh(Path(root)) for _ in range(options.repetitions)]
    from record import conditions, show, spread, write_record

    assert all(run["pictures"] == options.num for run in runs)
    results = {name: spread([run[name] for run in runs]) for name in runs[0] if name != "pictures"}
    for name, values in results.items():
        print(show(name, values, unit=""), file=sys.stderr)
    record = {"benchmark": "startup", "conditions": conditions(options), "results": results}
    write_record(record, options.out)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=IMAGENET_PICTURES, help="pictures (default: %(default)s)")
    parser.add_argument("--repetitions", type=int, default=10, help="fresh processes (default: %(default)s)")
    parser.add_argument("--scratch", type=Path, help="folder for the tree (default: the system's temporary folder)")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)  # what a fresh process is told
    options = parser.parse_args()
    if options.num < NUM_CLASSES or options.repetitions < 1:
        parser.error(f"--num is at least {NUM_CLASSES}, one picture per class, and --repetitions at least 1")
    return options


def build_tree(root: Path, *, num_pictures: int) -> None:
    """root/train/<wnid>/<wnid>_<number>.JPEG, empty, with names as long as ImageNet's."""
    per_class, rest = divmod(num_pictures, NUM_CLASSES)
    for label in range(NUM_CLASSES):
        wnid = f"n{label:08d}"
        folder = root / "train" / wnid
        folder.mkdir(parents=True)
        for number in range(per_class + (label < rest)):
            (folder / f"{wnid}_{number * 7919 % 100_000}.JPEG").touch()


def measure_fresh(root: Path) -> dict[str, Any]:
    """One repetition in a process of its own."""
    command = [sys.executable, __file__, "--measure", str(root)]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def measure_here(root: Path) -> dict[str, Any]:
    """Seconds of read_index, and this process's peak memory before and after it."""
    from bigbatch.trainer.data.imagenet import read_index

    before = peak_memory_mb()
    start = time.perf_counter()
    index = read_index(root, "train")
    seconds = time.perf_counter() - start
    after = peak_memory_mb()
    return {
        "pictures": len(index.paths),
        "read_index_seconds": seconds,
        "peak_memory_mb": after,
        "peak_memory_of_read_index_mb": after - before,
    }


def peak_memory_mb() -> float:
    """Largest resident memory so far in 1e6 bytes; getrusage would count the parent's before exec, too."""
    match = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert match, "needs Linux"
    return int(match[1]) * 1024 / 1e6


if __name__ == "__main__":
    main()
