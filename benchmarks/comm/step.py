"""Training steps with a real backward: exposed communication, ours and DDP's, in turn. A rank program.

    bigbatch launch emulate run --nodes 4 --ranks-per-node 2 --link 1gbit --python -- \
        -m benchmarks.comm.step --out step.json

A step is the forward and backward of a network on random images and the wait for the sums of its gradients. Exposed
is the time from the end of backward (the last gradient is ready, on the slowest rank) to the end of the wait (on the
slowest rank). The limit of a repetition is the time of the bytes minus what its own backward can hide:

    max over t of (t + 2(m-1)/m * bytes of the gradients that are ready at t or later / goodput) - end of backward

which for t = the first gradient's is: time of all bytes - (end of backward - first gradient). No schedule can do
better. "local" is the same step without communication: what sharing cores with communication costs backward.

Eight ranks on a few cores compute and communicate on the same cores, unlike ranks with GPUs. With --pace SECONDS
nothing is computed: backward takes so long by sleeping, and its gradients become ready in the order and at the shares
of it that the real network's backward was measured to have at the start of this run.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.arguments import require_at_least_one
from benchmarks.comm import links, peers
from benchmarks.comm.case_run import begin, choose_contestants, job_parser
from benchmarks.comm.gradient_sets import CostlessModel, Pace, make_values, start
from benchmarks.comm.job import Job, run_rank
from benchmarks.comm.tuning import TUNED_WIRES, describe_tuned, make_reducer, tune_each
from benchmarks.comm.turns import Contestant, Repetition, describe_repetitions, nothing, take_turns
from benchmarks.record import spread
from bigbatch.comm.measure.backward import measure_backward
from bigbatch.comm.measure.tune import TuneResults
from bigbatch.trainer.models import build_model

CONTESTANTS = ("ours tuned", "ours", "ours fp16", "ddp", "local")
WIRE_BYTES = {"ours tuned": 1.0, "ours": 1.0, "ours fp16": 0.5, "ddp": 1.0, "local": 0.0}
"""Bytes on the wire per byte of a gradient."""


def main() -> None:
    """Measure, and write the record."""
    run_rank(partial(run, parse()))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = job_parser(__doc__)
    add = parser.add_argument
    add("--model", default="resnet50", help="(default: %(default)s)")
    add("--batch", type=int, default=1, help="images per rank (default: %(default)s)")
    add("--image-size", type=int, default=64, help="pixels (default: %(default)s)")
    add("--pace", type=float, metavar="SECONDS", help="backward sleeps for this time instead of computing")
    add("--tune-seconds", type=float, default=25.0, help="tuning time for each tuned contestant (default: %(default)s)")
    options = parser.parse_args(argv)
    require_at_least_one(parser, options, "repetitions", "batch", "image_size")
    if options.pace is not None and options.pace <= 0:
        parser.error(f"--pace {options.pace:g}: give a positive number of seconds")
    return options


def run(options: argparse.Namespace) -> None:
    """Run one case. Collective. Raises: CommError."""
    case = begin(options)
    job, goodput = case.job, case.goodput
    names = choose_contestants(options.contestants, CONTESTANTS, left_out={})
    make_model = choose_model(job, options)
    tuned = tune_model(job, names, make_model(), seconds=options.tune_seconds)
    steps = {name: make_step(job, name, make_model(), tuned=tuned) for name in names}
    contestants = [Contestant(name, step.run, prepare=step.clear) for name, step in steps.items()]
    job.say(f"{options.model}, warming up")
    take_turns(job, contestants, repetitions=2)
    measured = take_turns(job, contestants, repetitions=options.repetitions)
    case.measure_links_again()
    if job.rank == 0:
        num_bytes = [p.numel() * 4 for p in steps[names[0]].parameters]
        rows = [
            describe_step(name, repetitions, num_bytes=num_bytes, num_nodes=job.num_nodes, goodput=goodput)
            for name, repetitions in measured.items()
        ]
        results = {
            "model": options.model,
            "num_bytes": sum(num_bytes),
            "pace_seconds": options.pace,
            "tuned": describe_tuned(tuned),
            "rows": rows,
        }
        case.write("step", results)
        for row in rows:
            job.say(show(row))
    peers.close(job)


@dataclass(frozen=True)
class Model:
    """A network, its loss function, and its start of backward."""

    network: nn.Module
    loss_of: Callable[[nn.Module], Tensor]
    """Takes the network, or its wrapper."""
    begin_backward: Callable[[], None] = nothing


def choose_model(job: Job, options: argparse.Namespace) -> Callable[[], Model]:
    """Choose the function that makes a model: the real one, or with --pace one that sleeps as long. Collective."""
    real = partial(make_real_model, job, options)
    if options.pace is None:
        return real
    model = real()
    named = dict(model.network.named_parameters())
    backward = measure_backward(named, lambda: model.loss_of(model.network), job.communicator, seconds=5.0)
    stretch = options.pace / backward.seconds
    pace = Pace([backward.ready_seconds[name] * stretch for name in named])
    values = make_values({name: tuple(p.shape) for name, p in named.items()})
    return lambda: Model(CostlessModel(values, weight=job.rank + 1, pace=pace), lambda net: net(start()), pace.begin)


def make_real_model(job: Job, options: argparse.Namespace) -> Model:
    """Make the network with the same weights everywhere, and random images of this rank."""
    torch.manual_seed(0)
    network = build_model(options.model, num_classes=1000, norm=nn.BatchNorm2d)
    network = network.to(memory_format=torch.channels_last)
    torch.manual_seed(1 + job.rank)
    images = torch.randn(options.batch, 3, options.image_size, options.image_size)
    images_BCHW = images.to(memory_format=torch.channels_last)
    labels_B = torch.randint(1000, (options.batch,))
    return Model(network, lambda net: F.cross_entropy(net(images_BCHW), labels_B))


def tune_model(job: Job, names: Sequence[str], model: Model, *, seconds: float) -> dict[str, TuneResults]:
    """Choose tables and plans for this model. Collective."""

    def forward() -> Tensor:
        loss = model.loss_of(model.network)
        model.begin_backward()
        return loss

    return tune_each(job, names, dict(model.network.named_parameters()), forward, seconds=seconds)


@dataclass
class Step:
    """Runs a contestant's forward, backward and wait, with the moment at which each gradient was ready."""

    model: Model
    network: nn.Module
    """The model's network, or its wrapper."""
    parameters: Sequence[nn.Parameter]
    wait: Callable[[], None]
    clear: Callable[[], None]
    ready: list[float] = field(default_factory=list)

    def run(self) -> list[float]:
        """Run the step; return the moments: forward's end, then each gradient's."""
        self.ready = [0.0] * len(self.parameters)
        loss = self.model.loss_of(self.network)
        forward_end = time.perf_counter()
        self.model.begin_backward()
        loss.backward()
        self.wait()
        return [forward_end, *self.ready]

    def mark(self, index: int, parameter: nn.Parameter) -> None:
        """Note that gradient number index is ready now."""
        self.ready[index] = time.perf_counter()


def make_step(job: Job, name: str, model: Model, *, tuned: Mapping[str, TuneResults]) -> Step:
    """Make one of CONTESTANTS over its own model. Collective."""
    network = model.network
    step = Step(model, network, list(network.parameters()), nothing, partial(network.zero_grad, set_to_none=True))
    for index, parameter in enumerate(step.parameters):  # before contestants that start to sum by such a hook
        parameter.register_post_accumulate_grad_hook(partial(step.mark, index))
    if name == "ddp":
        step.network = DistributedDataParallel(network, init_sync=False)  # all ranks have the same weights
    elif name != "local":
        named = dict(network.named_parameters())
        reducer = make_reducer(job, named, tuned=tuned.get(name), wire=TUNED_WIRES.get(name))
        step.wait, step.clear = reducer.wait, reducer.zero_grad
    return step


def describe_step(
    name: str,
    repetitions: Sequence[Repetition],
    *,
    num_bytes: Sequence[int],
    num_nodes: int,
    goodput: Sequence[float | None],
) -> dict[str, Any]:
    """Make one contestant's row: seconds of the step and its parts, exposed communication, and its limit."""
    best = links.best_goodput(goodput)
    row = {"contestant": name, **describe_repetitions(repetitions)}
    row["forward_seconds"] = spread([each.marks[0] for each in repetitions])
    row["backward_seconds"] = spread([max(each.marks[1:-1]) - each.marks[0] for each in repetitions])
    exposed = [each.seconds - max(each.marks[1:-1]) for each in repetitions]
    row["exposed_seconds"], row["each_exposed_seconds"] = spread(exposed), exposed
    row["ready_seconds"] = [
        statistics.median(column) for column in zip(*(r.marks[1:-1] for r in repetitions), strict=True)
    ]
    if best is not None and num_nodes > 1:
        wire_bytes = [round(each * WIRE_BYTES[name]) for each in num_bytes]
        limits = [
            links.least_exposed_seconds(r.marks[1:-1], wire_bytes, num_nodes=num_nodes, goodput=best)
            for r in repetitions
        ]
        row["limit_exposed_seconds"], row["each_limit_exposed_seconds"] = spread(limits), limits
        row["bytes_seconds"] = links.limit_seconds(sum(wire_bytes), num_nodes=num_nodes, goodput=best)
        if min(limits) > 0:
            row["exposed_over_limit"] = spread([a / b for a, b in zip(exposed, limits, strict=True)])
    return row


def show(row: dict[str, Any]) -> str:
    """Write a row as one line."""
    over = row.get("exposed_over_limit")
    limit = row.get("limit_exposed_seconds")
    return (
        f"{row['contestant']:10} step {row['seconds']['median']:7.3f} s, backward "
        f"{row['backward_seconds']['median']:7.3f} s, exposed {row['exposed_seconds']['median']:7.3f} s"
        + (f", limit {limit['median']:7.3f} s" if limit else "")
        + (f", exposed / limit {over['median']:.3f}" if over else "")
    )


if __name__ == "__main__":
    main()
