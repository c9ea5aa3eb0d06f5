"""Training on a CPU beside other work, by how long OpenMP's waiting threads spin before they sleep.

    python -m benchmarks.largebatch.busy_cpu --turns 11 --out benchmarks/results/busy-cpu.json

Each case is a process that trains the quick start's network on all cores when it is asked to. The cases take turns in
a drawn order, first alone, then beside --others computing processes. "default" is GNU OpenMP's own bound, "passive"
does not spin. Ratios are taken turn by turn: to the default on an idle machine, to passive on a busy one.
"""

import argparse
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.record import at_least, conditions, ratios, run, show, spread, write_record
from bigbatch.cores import SPIN_COUNT, SPINS, STATED

SIZE, WIDTH, WARM_UP_STEPS = 48, 16, 3
CASES = {"default": {}, "passive": {"OMP_WAIT_POLICY": "passive"}, "bigbatch": {SPIN_COUNT: str(SPINS)}}
"""Case -> variables of its process."""


def work(batch: int) -> None:
    """Train for each line of standard input, a number of seconds; answer with images per second."""
    import torch
    import torch.nn.functional as F

    from bigbatch.trainer.models import build_model

    net = build_model("resnet9", num_classes=10, norm=torch.nn.BatchNorm2d, width=WIDTH)
    net.to(memory_format=torch.channels_last)
    images_BCHW = torch.randn(batch, 3, SIZE, SIZE).contiguous(memory_format=torch.channels_last)
    labels_B = torch.zeros(batch, dtype=torch.long)

    def step() -> None:
        net.zero_grad()
        F.cross_entropy(net(images_BCHW), labels_B).backward()

    for _ in range(WARM_UP_STEPS):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < float(line):
            step()
            steps += 1
        print(steps * batch / (time.perf_counter() - start), flush=True)


@contextmanager
def trainer(variables: dict[str, str], batch: int) -> Iterator["subprocess.Popen[str]"]:
    """Start a process that trains when asked to, and end it."""
    environ = {name: value for name, value in os.environ.items() if name not in STATED} | variables
    command = [sys.executable, "-m", "benchmarks.largebatch.busy_cpu", "--work", "--batch", str(batch)]
    with subprocess.Popen(
        command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:
        try:
            answer(process)
            yield process
        finally:
            process.kill()


def answer(process: "subprocess.Popen[str]", seconds: float | None = None) -> str:
    """Return a process's next line, after asking it to train for some seconds."""
    assert process.stdin
    assert process.stdout
    if seconds is not None:
        process.stdin.write(f"{seconds}\n")
    return process.stdout.readline()


@contextmanager
def other_work(number: int) -> Iterator[None]:
    """Keep cores busy by processes that only compute."""
    command = [sys.executable, "-c", "while True: pass"]
    others = [subprocess.Popen(command) for _ in range(number)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    if options.work:
        return work(options.batch)
    facts, found = conditions(options), {}
    with ExitStack() as stack:
        trainers = {name: stack.enter_context(trainer(variables, options.batch)) for name, variables in CASES.items()}
        for load, others, base in (("idle", 0, "default"), ("busy", options.others, "passive")):
            rates: dict[str, list[float]] = {name: [] for name in CASES}
            with other_work(others):
                for turn in range(options.turns):
                    for name in random.Random(turn).sample(list(CASES), len(CASES)):
                        rates[name].append(float(answer(trainers[name], options.seconds)))
            found[load] = {
                name: {"images_per_second": spread(own), f"ratio_to_{base}": spread(ratios(own, rates[base]))}
                for name, own in rates.items()
            }
            for name, own in rates.items():
                print(show(f"{load}, {name}", spread(own), unit="images/s"), file=sys.stderr)
                print(show(f"  over {base}", spread(ratios(own, rates[base])), unit=""), file=sys.stderr)
    write_record(options.out, {"benchmark": "busy CPU", "conditions": facts, "loads": found})
    return None


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=at_least(1), default=9, metavar="N", help="of each case; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=3.0, metavar="S", help="of a turn; default: %(default)s")
    parser.add_argument("--others", type=at_least(1), default=4, metavar="N", help="processes; default: %(default)s")
    parser.add_argument("--batch", type=at_least(1), default=128, metavar="N", help="images; default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="PATH")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


if __name__ == "__main__":
    run(main)
