"""One measurement of precision.py, in a process of its own; its figures go to standard output as JSON.

    python -m benchmarks.gpu.precision_case speed --model resnet18 --precision bf16 --batch 512 --steps 20

speed: training steps on generated images of 32 pixels, and the memory that they took at most. On a GPU that is what
torch had allocated in the timed ones, without cuDNN's search; on a CPU, by how much the process grew. largest: the
largest microbatch that fits, to within a fifth; a CPU is given so many MB more than it has before the first try.
"""

import argparse
import json
import re
import resource
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bigbatch.comm.connect import choose_device
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import RESNETS, SCALED
from bigbatch.trainer.machine.host import keep_freed_memory, set_tf32
from bigbatch.trainer.memory.largest_batch import fits_memory, largest_fitting, run_steps
from bigbatch.trainer.step.precision import COMPUTE_DTYPES

SPAN = 32
OCTAVES, PER_OCTAVE = 12, 4
"""Microbatches to try: 32 to 131072, each at most a fifth larger than the one before, in whole ghost batches."""


def main() -> None:
    options = parse()
    device = choose_device(ALONE)
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.backends.cudnn.benchmark = True
        set_tf32(options.precision == "tf32")
    else:
        torch.set_num_threads(options.threads)
        keep_freed_memory()
    measure = measure_speed if options.what == "speed" else measure_largest
    print(json.dumps(measure(recipe(settings(options.model, options.precision)), options, device=device)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("what", choices=("speed", "largest"))
    add("--model", choices=RESNETS, required=True)
    add("--precision", choices=tuple(COMPUTE_DTYPES), required=True)
    add("--batch", type=int, default=512, help="images of a step (default: %(default)s)")
    add("--steps", type=int, default=20, help="timed (default: %(default)s)")
    add("--untimed", type=int, default=10, help="steps before those (default: %(default)s)")
    add("--memory-mb", type=int, default=500, help="memory that a CPU may give (default: %(default)s)")
    add("--threads", type=int, default=1, help="threads of a CPU (default: %(default)s)")
    return parser.parse_args()


def settings(model: str, precision: str) -> dict[str, Any]:
    """List overrides of the recipe cifar10 for that model in that precision."""
    unscaled = {"optimizer.loss_scale": "null", "optimizer.loss_scale_growth_steps": "null"}
    return {
        "model.name": model,
        "batch.bn_span": SPAN,
        "optimizer.precision": precision,
        **({} if precision in SCALED else unscaled),
    }


def recipe(overrides: Mapping[str, Any]) -> Config:
    """Load the recipe cifar10 with overrides."""
    return load_config(["--config", "cifar10", *(f"--{key}={value}" for key, value in overrides.items())])


def measure_speed(config: Config, options: argparse.Namespace, *, device: torch.device) -> dict[str, float]:
    """Measure images per second, and MB (1e6 bytes)."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = run_steps(config, options.batch, device=device, num_untimed=options.untimed, num_timed=options.steps)
    if device.type == "cuda":
        peak_bytes = torch.cuda.max_memory_allocated(device)
    else:
        peak_bytes = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {"images_per_second": options.batch / seconds, "peak_mb": peak_bytes / 1e6}


def measure_largest(config: Config, options: argparse.Namespace, *, device: torch.device) -> dict[str, int | None]:
    """Find the images of a microbatch; None if not even one ghost batch fits."""
    if device.type == "cpu":
        now = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert now, "Linux tells it"
        limit = 1024 * int(now[1]) + options.memory_mb * 10**6
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    sizes = sorted({SPAN * round(2 ** (step / PER_OCTAVE)) for step in range(OCTAVES * PER_OCTAVE + 1)})
    found = largest_fitting(sizes, lambda size: fits_memory(config, size, device=device), is_last_near=False)
    return {"largest": found.size}


if __name__ == "__main__":
    main()
