"""Time from the command to the end of the first step, with a cold and with a warm compile cache."""

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.suite.context import TOO_LONG, Context, Found
from benchmarks.gpu.suite.job import COMPILED, Settings, as_options, settings_for
from bigbatch.trainer.run.folder import RunDir, read_records

ROUNDS = 3
"""Most rounds: each takes a minute or more."""


def measure(context: Context) -> Found:
    """Start fresh processes of `bigbatch train`. Cold: an empty cache; warm: the one that the cold start filled."""
    found = Found()
    rounds = range(min(ROUNDS, context.size.rounds))
    found.add("eager", [first_step(context, {}, name=f"eager-{number}") for number in rounds], unit="s")
    if not context.compiles:
        found.left_out["compile"] = TOO_LONG
    else:
        turns = ("cold", "warm")
        seconds = [
            [first_step(context, COMPILED, name=f"{turn}-{number}", cache=f"cache-{number}") for turn in turns]
            for number in rounds
        ]
        for turn, values in zip(turns, zip(*seconds, strict=True), strict=True):
            found.add(f"compile, {turn} cache", values, unit="s")
    return found


def first_step(context: Context, settings: Settings, *, name: str, cache: str = "cache") -> float:
    """Measure seconds from starting the process to the report of its first step."""
    size, folder = context.size, context.scratch / "starting" / name
    whole = {
        **settings_for(size, batch=size.batch, precision=context.precision),
        **settings,
        "compute.mode": "eager",  # as stated: a first start would measure other modes
        "data.num_synthetic_samples": 2 * size.batch,
        "run.directory": str(folder),
        "run.epochs": 1,
        "run.log_every_steps": 1,
        "run.eval_every_epochs": 1,
        "run.eval_offset_epochs": 0,
        "run.divergence_steps": None,
    }
    command = [sys.executable, "-m", "bigbatch", "train", "--config", "imagenet/resnet50_8k", *as_options(whole)]
    start = time.time()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=with_cache(context.scratch / cache))
    return seconds_to_first_step(folder, start=start)


def with_cache(folder: Path) -> dict[str, str]:
    """Return this process's environment with the compiler's cache in folder."""
    return {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder)}


def seconds_to_first_step(folder: Path, *, start: float) -> float:
    """Return the seconds to the first step's record. start: seconds since the epoch, like the records."""
    return next(float(each["time"]) for each in read_records(RunDir(folder).metrics) if each["kind"] == "train") - start
