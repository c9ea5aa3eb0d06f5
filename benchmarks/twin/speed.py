"""Time of the simulator: 2,048 and 100,000 GPUs, all algorithms, and its number of events.

python -m benchmarks.twin.speed --out benchmarks/results/simulate-speed.json
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.record import at_least, conditions, show, spread, write_record
from bigbatch.tools.simulate.cluster import load_cluster
from bigbatch.tools.simulate.network import ALGORITHMS, BY_SIZE
from bigbatch.tools.simulate.scaling import Scenario, simulate_scaling
from bigbatch.trainer.config.file import load_config

RECIPE, CLUSTER = "imagenet/resnet50_64k", "dgx_a100"
PER_GPU = 128
"""Images of each GPU in a step: the batch grows with their number."""
LIMITS = {2048: 1.0, 102_400: 10.0}
"""Seconds that all algorithms together may take, by the number of GPUs."""


def scenario_of(num_devices: int, *, algorithm: str) -> Scenario:
    """Return the scenario of a step on that many GPUs with PER_GPU images each, by one algorithm."""
    batch = [
        "--batch.global_batch_size",
        str(num_devices * PER_GPU),
        "--batch.microbatch_size",
        str(PER_GPU),
    ]
    return Scenario(load_config(["--config", RECIPE, *batch]), load_cluster(CLUSTER), algorithm=algorithm)


def simulate_all(num_devices: int) -> int:
    """Simulate a step by each algorithm; return the number of buffers in all."""
    transfers = 0
    for algorithm in (*ALGORITHMS, BY_SIZE):
        (point,), _ = simulate_scaling(scenario_of(num_devices, algorithm=algorithm), [num_devices])
        transfers += len(point.step.transfers)
    return transfers


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    facts = conditions(options)
    found = {}
    for num_devices, limit in LIMITS.items():
        seconds, events = [], 0
        for _ in range(options.rounds):
            start = time.perf_counter()
            events = simulate_all(num_devices)
            seconds.append(time.perf_counter() - start)
        figures = spread(seconds)
        print(show(f"{num_devices:,} GPUs, {len(ALGORITHMS) + 1} algorithms", figures, unit=f"s, below {limit:g}"))
        found[str(num_devices)] = {"seconds": figures, "limit_seconds": limit, "transfers": events}
    if options.out:
        write_record(options.out, {"conditions": facts, "gpus": found})


if __name__ == "__main__":
    main()
