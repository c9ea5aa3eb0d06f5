"""Scaling efficiency: steps of stated length with a network's gradients, ours, DDP's and Horovod's. A rank program.

    bigbatch launch emulate run --nodes 4 --link 1gbit --python -- \
        -m benchmarks.comm.scaling --model resnet50 --weak 1 --strong 2 --out scaling.json

Nothing is computed: forward and backward sleep, and gradients become ready in the order and at the shares of the time
that the real network's were measured to have at the start of this run, so that nodes that share a few cores scale as
nodes with GPUs of their own would. The gradients are real, are summed for real, and are checked after each step.
All contestants take turns in the same processes.

--weak SECONDS: forward and backward of each rank, on any number of nodes (the batch grows with them).
--strong SECONDS: of one node; n nodes take 1/n of it each (the batch stays, and computing is taken to scale).

Efficiency is the time of the same step without communication, "local", over the time of the step. The limit is what
no schedule can exceed: local / (local + the least communication that must be left after backward, see links.py).
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.comm import links
from benchmarks.comm.case_run import begin, choose_with_horovod, job_parser
from benchmarks.comm.gradient_sets import CostlessModel, Pace, make_values, start
from benchmarks.comm.gradients import make_contestant
from benchmarks.comm.job import Job, close, run_rank
from benchmarks.comm.tuning import describe_tuned, tune_each
from benchmarks.comm.turns import Repetition, describe_repetitions, take_turns
from benchmarks.record import spread
from bigbatch.tools.measure.whole_steps import measure_backward
from bigbatch.trainer.models import build_model

CONTESTANTS = ("ours", "ddp", "horovod", "local")
ALONE = ("ours tuned",)
"""Only where --contestants asks for it: beside "ours" it would start its sums in wait(), as would "ours"."""
FORWARDS = 3
"""Forward passes that are timed; the median counts."""


def main() -> None:
    run_rank(partial(run, parse()))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = job_parser(__doc__)
    add = parser.add_argument
    add("--model", default="resnet50", help="(default: %(default)s)")
    add("--weak", type=float, metavar="SECONDS", help="time of forward and backward, on any number of nodes")
    add("--strong", type=float, metavar="SECONDS", help="time of forward and backward on one node")
    add("--batch", type=int, default=2, help="images per rank while backward is recorded (default: %(default)s)")
    add("--image-size", type=int, default=224, help="pixels, likewise (default: %(default)s)")
    add("--tune-seconds", type=float, default=15.0, help="tuning time for the tuned contestant (default: %(default)s)")
    options = parser.parse_args(argv)
    if options.weak is None and options.strong is None:
        parser.error("give --weak or --strong, or both")
    if any(each is not None and each <= 0 for each in (options.weak, options.strong)):
        parser.error("--weak and --strong must be above 0")
    return options


def run(options: argparse.Namespace) -> None:
    """Run one case. Collective. Raises: CommError."""
    case = begin(options)
    job, goodput = case.job, case.goodput
    names, horovod, left_out = choose_with_horovod(job, options.contestants, CONTESTANTS, alone=ALONE)
    shapes, pace = record_pace(job, options)
    lengths = {"weak": options.weak, "strong": options.strong and options.strong / job.num_nodes}
    lengths = {mode: seconds for mode, seconds in lengths.items() if seconds is not None}  # of steps on each node
    values, wrong = make_values(shapes), dict.fromkeys(names, 0)
    num_bytes = [value.nbytes for value in values.values()]
    job.say(f"steps at the pace of {options.model}")
    rows, tuned_for = [], {}
    for seconds in sorted(set(lengths.values())):
        pace.take(seconds)
        tuned = tune_model(job, names, CostlessModel(values, weight=1, pace=pace), seconds=options.tune_seconds)
        make = partial(make_contestant, job, tuned=tuned, horovod=horovod, wrong=wrong)
        contestants = [make(name, CostlessModel(values, weight=job.rank + 1, pace=pace)) for name in names]
        take_turns(job, [each for each in contestants if each.round == 1], repetitions=2)
        measured = take_turns(job, contestants, repetitions=options.repetitions)
        tuned_for[f"{seconds:g} s"] = describe_tuned(tuned)
        limit = limit_efficiency(pace, num_bytes, num_nodes=job.num_nodes, goodput=links.best_goodput(goodput))
        for mode in (mode for mode, each in lengths.items() if each == seconds):
            rows += describe(mode, measured, seconds=seconds, limit=limit)
    case.measure_links_again()
    all_wrong = job.gather(wrong)
    if job.rank == 0:
        results = {
            "model": options.model,
            "num_bytes": sum(num_bytes),
            "tuned": tuned_for,
            "left_out": left_out,
            "num_wrong": {name: sum(each[name] for each in all_wrong) for name in names},
            "rows": rows,
        }
        case.write("scaling", results)
        for row in rows:
            job.say(show(row))
    close(job)


def record_pace(job: Job, options: argparse.Namespace) -> tuple[dict[str, tuple[int, ...]], Pace]:
    """Record shapes of parameters, and the times of forward and backward, on the slowest rank. Collective."""
    network, loss = make_real_model(job, options)
    named = dict(network.named_parameters())
    backward = measure_backward(named, loss, job.communicator, seconds=10.0)
    forwards = []
    for _ in range(FORWARDS):
        began = time.perf_counter()
        loss()
        forwards.append(time.perf_counter() - began)
    forward_seconds = max(job.gather(statistics.median(forwards)))
    shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
    return shapes, Pace([backward.ready_seconds[name] for name in named], forward_seconds=forward_seconds)


def make_real_model(job: Job, options: argparse.Namespace) -> tuple[nn.Module, Callable[[], Tensor]]:
    """Make the network with the same weights everywhere, and its loss for random images of this rank."""
    torch.manual_seed(0)
    network = build_model(options.model, num_classes=1000, norm=nn.BatchNorm2d).to(memory_format=torch.channels_last)
    torch.manual_seed(1 + job.rank)
    images = torch.randn(options.batch, 3, options.image_size, options.image_size)
    images_BCHW = images.to(memory_format=torch.channels_last)
    labels_B = torch.randint(1000, (options.batch,))
    return network, lambda: F.cross_entropy(network(images_BCHW), labels_B)


def tune_model(job: Job, names: Sequence[str], model: CostlessModel, *, seconds: float) -> dict[str, Any]:
    """Choose table and plan as `bigbatch comm tune` chooses them for this step. Collective."""

    def forward() -> Any:
        loss = model(start())
        model.begin()
        return loss

    return tune_each(job, names, dict(model.named_parameters()), forward, seconds=seconds)


def limit_efficiency(pace: Pace, num_bytes: Sequence[int], *, num_nodes: int, goodput: float | None) -> float:
    """Compute a step's efficiency at this pace, its fp32 gradients over links of this goodput (bits per second)."""
    if num_nodes == 1 or goodput is None:
        return 1.0
    exposed = links.least_exposed_seconds(pace.ready_seconds, num_bytes, num_nodes=num_nodes, goodput=goodput)
    return pace.seconds / (pace.seconds + exposed)


def describe(mode: str, measured: dict[str, list[Repetition]], *, seconds: float, limit: float) -> list[dict[str, Any]]:
    """Make a row per contestant. Efficiencies are by pairs of repetitions of the same turn."""
    local = [each.seconds for each in measured.get("local", [])]
    rows = []
    for name, repetitions in measured.items():
        row = {"scaling": mode, "contestant": name, "compute_seconds": seconds, **describe_repetitions(repetitions)}
        if local:
            pairs = zip(local, (each.seconds for each in repetitions), strict=True)
            row["efficiency"] = spread([alone / together for alone, together in pairs])
            row["limit_efficiency"] = limit
        rows.append(row)
    return rows


def show(row: dict[str, Any]) -> str:
    efficiency = row.get("efficiency")
    return (
        f"{row['scaling']:6} {row['contestant']:10} step {row['seconds']['median']:7.3f} s, computing "
        f"{row['compute_seconds']:.3f} s"
        + (f", efficiency {efficiency['median']:.3f} of at most {row['limit_efficiency']:.3f}" if efficiency else "")
    )


if __name__ == "__main__":
    main()
