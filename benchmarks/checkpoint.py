"""CPU time of a checkpoint: of the copy, for which training waits, and of the thread that then writes it.

    python -m benchmarks.checkpoint --out benchmarks/results/checkpoint.json

Other work on the machine changes CPU time little. Shares are those of one core in the interval between checkpoints.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.suite.context import SMALL
from benchmarks.gpu.suite.job import Job, settings_for
from benchmarks.record import at_least, conditions, run, show, spread, write_record
from bigbatch.awake import awake_seconds
from bigbatch.trainer.checkpoint.checkpoint import save_checkpoint
from bigbatch.trainer.checkpoint.saving import BackgroundWrite

INTERVAL_SECONDS = 60


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="resnet50", help="value of model.name (default: %(default)s)")
    add("--rounds", type=at_least(1), default=10, help="checkpoints (default: %(default)s)")
    add("--scratch", type=Path, help="a folder on the disk that is written to (default: that of temporary files)")
    add("--out", type=Path, help="JSON file for the results (default: standard output)")
    options = parser.parse_args(argv)
    facts, size, milliseconds = conditions(options), SMALL, dict[str, list[float]](copy=[], write=[])
    settings = settings_for(size, batch=8, precision="fp32")
    settings |= {"model.name": options.model, "data.image_size": 64}
    with closing(Job(settings)) as job, tempfile.TemporaryDirectory(dir=options.scratch) as folder:
        for number in range(options.rounds + 1):
            job.run(1)  # with this optimizer's state
            state = {"model": job.parts.model.state_dict(), "optimizer": job.parts.optimizer.state_dict()}
            start = time.process_time()
            write = BackgroundWrite(
                state,
                partial(save, Path(folder), number),
                name="a checkpoint",
                started=awake_seconds(),
            )
            copied = time.process_time()
            assert write.ends_within(300.0)
            assert write.error is None
            if number:  # the first round warms up
                milliseconds["copy"].append(1e3 * (copied - start))
                milliseconds["write"].append(1e3 * (time.process_time() - copied))
        [num_bytes] = [path.stat().st_size for path in Path(folder).glob("*/state.pt")]
    spreads = {name: spread(values) for name, values in milliseconds.items()}
    percent = {name: spread([each / 10 / INTERVAL_SECONDS for each in milliseconds[name]]) for name in milliseconds}
    for name, values in spreads.items():
        print(show(name, values, unit="ms"))
    facts |= {"interval_seconds": INTERVAL_SECONDS, "clock": "CPU time"}
    record = {"conditions": facts, "bytes": num_bytes, "milliseconds": spreads, "percent_of_interval": percent}
    write_record(options.out, {"benchmark": "checkpoint", **record})


def save(folder: Path, step: int, copied: dict[str, Any], _: object) -> None:
    save_checkpoint(folder, copied, step=step, top1=None, keep=1)


if __name__ == "__main__":
    run(main)
