"""Audits and replays of healthy runs: false alarms, seconds of an audit, and how many replayed steps are equal.

    python -m benchmarks.faults.audits --out benchmarks/results/audits-cpu.json

The audited run has one microbatch of 2 images per rank and step, and audits each step. The replayed run has 64 virtual
ranks; the steps to replay are drawn. Both train a tiny ResNet-9 on images that are generated here.
"""

import argparse
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.record import at_least, conditions, run, show, spread, write_record
from bigbatch.tools.replay.diff import read_run
from bigbatch.tools.replay.replay import replay
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.folder.folder import RunDir, load_run_config, read_records

IMAGES = 160
MICROBATCH = 2
SETTINGS: dict[str, object] = {
    "run.reproducible": "true",
    "run.loggers": "[]",
    "data.loader": "torchvision",
    "data.image_size": 16,
    "data.eval_crop_fraction": 1.0,
    "data.probe_seconds": 0,
    "model.options.width": 2,
    "batch.microbatch_size": MICROBATCH,
    "batch.bn_span": MICROBATCH,
    "comm.algorithm": "ring",
    "comm.timeout_seconds": 300,
}
VIRTUAL_RANKS = 64


def train(folder: Path, *, ranks: int, steps: int, batch: int, **settings: object) -> Path:
    """Train that many steps, with one evaluation at the end; return the run folder."""
    epochs = -(-steps // (IMAGES // batch))
    stated = SETTINGS | {"batch.global_batch_size": batch, "run.epochs": epochs, "run.eval_every_epochs": epochs}
    stated |= {"data.root": folder / "data", "run.directory": folder / f"of-{batch}", "schedule.warmup_epochs": 0}
    stated |= {key.replace("__", "."): value for key, value in settings.items()}
    words = [f"--{key}={value}" for key, value in stated.items()]
    launch = [sys.executable, "-m", "bigbatch", "launch", "local", "--ranks", str(ranks), "--", "train"]
    subprocess.run([*launch, "--config", "quickstart", "--quiet", *words], check=True)
    return folder / f"of-{batch}"


def audits(folder: Path, *, ranks: int, number: int) -> dict[str, Any]:
    """Audit that many microbatches in all; return the counts, and seconds of audits and of steps without them."""
    steps = -(-number // ranks)
    path = train(folder, ranks=ranks, steps=steps, batch=MICROBATCH * ranks, run__audit_every_steps=1)
    records = list(read_records(RunDir(path).metrics))
    found = [each for each in records if each["kind"] == "audit"]
    rates = [each["images_per_second"] for each in records if each["kind"] == "train"][1:]
    seconds = spread([each["seconds"] for each in found])
    return {
        "compared": sum(each["compared"] for each in found),
        "false_alarms": sum("going back" in each["hint"] for each in records if each["kind"] == "hint"),
        "audit_seconds": seconds,
        "step_seconds": spread([MICROBATCH * ranks / rate - seconds["median"] for rate in rates]),
    }


def replays(folder: Path, *, ranks: int, steps: int, number: int, seed: int) -> dict[str, Any]:
    """Replay that many drawn steps of a run; return how many were equal, and their seconds."""
    path = train(
        folder,
        ranks=ranks,
        steps=steps,
        batch=MICROBATCH * VIRTUAL_RANKS,
        batch__virtual_ranks=VIRTUAL_RANKS,
        run__digest_every_steps=1,
        run__checkpoint_every_steps=2,
        run__keep_checkpoints=steps,
    )
    recorded, config = read_run(path), load_run_config(RunDir(path), [], prog="audits")
    num_equal, taken = 0, []
    for step in random.Random(seed).sample(range(1, steps + 1), number):
        started = time.perf_counter()
        num_equal += replay(recorded, config, step=step) == 0
        taken.append(time.perf_counter() - started)
    return {"virtual_ranks": VIRTUAL_RANKS, "steps": steps, "equal": num_equal, "seconds": spread(taken)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=at_least(1), default=4)
    parser.add_argument("--audits", type=at_least(1), default=10_000, help="microbatches to audit")
    parser.add_argument("--replays", type=at_least(1), default=100, help="steps to replay")
    parser.add_argument("--seed", type=at_least(0), default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    record: dict[str, Any] = {"conditions": conditions(options)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_dataset(folder / "data", train_per_class=IMAGES // 10, val_per_class=2, side_pixels=(16, 20))
        record["replays"] = replays(
            folder, ranks=options.ranks, steps=options.replays, number=options.replays, seed=options.seed
        )
        print(f"replays: {record['replays']['equal']} of {options.replays} equal", flush=True)
        record["audits"] = audits(folder, ranks=options.ranks, number=options.audits)
    print(f"audits: {record['audits']['false_alarms']} false alarms of {record['audits']['compared']}")
    print(show("audit", record["audits"]["audit_seconds"], unit="s"))
    print(show("step without it", record["audits"]["step_seconds"], unit="s"))
    write_record(options.out, record)


if __name__ == "__main__":
    run(main)
