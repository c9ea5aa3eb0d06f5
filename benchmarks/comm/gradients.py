"""All gradients of a network summed over ranks: our reducer, DDP and Horovod in one set of processes, in turn.

    bigbatch launch emulate run --nodes 4 --ranks-per-node 2 --link 200mbit --python -- \
        -m benchmarks.comm.gradients --model resnet50 --out gradients.json

The gradients are those of the real network, in the order in which its backward makes them ready, but nothing is
computed: a repetition is the time from the start of backward to the moment when all gradients are summed on all
ranks. "ours" is the GradientReducer with hierarchical all-reduce and its default plan; "ours tuned" has the table and
the plan that `bigbatch comm tune` would choose, measured at the start of this run; "ours fp16" is the same with, and
tuned for, an fp16 wire. DDP has its defaults (gloo, fp32, 25 MB buckets), its own fp16 hook, or our hook; Horovod its
defaults over MPI. Every gradient is checked after every repetition.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.comm import links
from benchmarks.comm.case_run import begin, choose_with_horovod, job_parser
from benchmarks.comm.gradient_sets import CostlessModel, count_wrong, make_values, parameter_shapes, start
from benchmarks.comm.job import HOROVOD_ROUND, Job, close, run_rank
from benchmarks.comm.tuning import DEFAULT_ALGORITHM, TUNED_WIRES, describe_tuned, make_reducer, tune_each
from benchmarks.comm.turns import Contestant, describe_repetitions, nothing, take_turns
from bigbatch.comm.gradients.ddp_hook import ddp_comm_hook
from bigbatch.tools.measure.tune import TuneResults

CONTESTANTS = ("ours tuned", "ours fp16", "ours", "ddp", "ddp fp16", "ddp with our hook", "horovod")
WIRES = {**TUNED_WIRES, "ddp fp16": "float16"}


def main() -> None:
    run_rank(partial(run, parse()))


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = job_parser(__doc__)
    parser.add_argument("--model", default="resnet50", help="model of the gradients (default: %(default)s)")
    parser.add_argument("--tune-seconds", type=float, default=25.0, help="for each tuned contestant's table and plan")
    return parser.parse_args(argv)


def run(options: argparse.Namespace) -> None:
    """Run one case. Collective. Raises: CommError."""
    case = begin(options)
    job, goodput = case.job, case.goodput
    names, horovod, left_out = choose_with_horovod(job, options.contestants, CONTESTANTS)
    values = make_values(parameter_shapes(options.model))
    model = CostlessModel(values, weight=1)
    named = dict(model.named_parameters())
    tuned = tune_each(job, names, named, lambda: model(start()), seconds=options.tune_seconds)
    wrong = dict.fromkeys(names, 0)
    make = partial(make_contestant, job, tuned=tuned, horovod=horovod, wrong=wrong)
    contestants = [make(name, CostlessModel(values, weight=job.rank + 1)) for name in names]
    job.say(f"{options.model}, warming up")
    # DDP and our reducer learn the order in the first step; a contestant with rounds warms up in each
    take_turns(job, [each for each in contestants if each.round == 1], repetitions=2)
    measured = take_turns(job, contestants, repetitions=options.repetitions)
    case.measure_links_again()
    all_wrong = job.gather(wrong)
    num_bytes = sum(value.nbytes for value in values.values())
    if job.rank == 0:
        rows = [
            {
                "contestant": name,
                "wire": WIRES.get(name) or "float32",
                "num_wrong": sum(each[name] for each in all_wrong),
                **describe_repetitions(repetitions),
            }
            for name, repetitions in measured.items()
        ]
        results = {
            "model": options.model,
            "num_bytes": num_bytes,
            "limit_seconds": _limit(num_bytes, goodput, num_nodes=job.num_nodes),
            "tuned": describe_tuned(tuned),
            "left_out": left_out,
            "rows": rows,
        }
        case.write("gradients", results)
        for row in rows:
            job.say(
                f"{row['contestant']:20} {row['seconds']['median']:8.3f} s, n = {row['seconds']['n']}, "
                f"{row['num_wrong']} wrong"
            )
    close(job)


def _limit(num_bytes: int, goodput: Sequence[float | None], *, num_nodes: int) -> float | None:
    best = links.best_goodput(goodput)
    return links.limit_seconds(num_bytes, num_nodes=num_nodes, goodput=best) if best is not None else None


@dataclass
class Step:
    """Runs a contestant's step: forward before the clock starts, backward and the wait for the sums under it."""

    model: nn.Module
    parameters: Sequence[nn.Parameter]
    wait: Callable[[], None]
    clear: Callable[[], None]
    expected: float
    """Factor of each gradient's value: the sum of all ranks' weights, or their mean."""
    begin: Callable[[], None]
    """Timed, before backward."""
    loss: Tensor | None = None

    def prepare(self) -> None:
        self.clear()
        self.loss = self.model(start())

    def run(self) -> None:
        assert self.loss is not None
        self.begin()
        self.loss.backward()
        self.wait()

    def count_wrong(self) -> int:
        """Count parameters with a wrong gradient."""
        return count_wrong(self.parameters, expected=self.expected)

    def contestant(self, name: str, wrong: dict[str, int]) -> Contestant:
        """Make a contestant of it. Wrong gradients are counted in wrong[name]."""

        def finish() -> None:
            wrong[name] += self.count_wrong()

        return Contestant(name, self.run, prepare=self.prepare, finish=finish)


def make_contestant(
    job: Job,
    name: str,
    model: CostlessModel,
    *,
    tuned: Mapping[str, TuneResults],
    horovod: Any,
    wrong: dict[str, int],
) -> Contestant:
    """Make one of CONTESTANTS over its own model. Collective. Wrong gradients are counted in wrong[name]."""
    if name == "horovod":
        return _horovod(job, model, horovod, wrong)
    if name.startswith("ddp"):
        step = _ddp_step(job, name, model)
    elif name == "local":
        step = Step(model, [*model.parameters()], nothing, model.zero_grad, job.rank + 1, model.begin)
    else:
        step = _ours_step(job, name, model, tuned.get(name))
    return step.contestant(name, wrong)


def _sum_of_weights(job: Job) -> float:
    world_size = job.communicator.world_size
    return world_size * (world_size + 1) / 2


def _ours_step(job: Job, name: str, model: CostlessModel, tuned: TuneResults | None) -> Step:
    named = dict(model.named_parameters())
    reducer = make_reducer(job, named, tuned=tuned, wire=WIRES.get(name))
    return Step(model, list(model.parameters()), reducer.wait, reducer.zero_grad, _sum_of_weights(job), model.begin)


def _ddp_step(job: Job, name: str, model: CostlessModel) -> Step:
    ddp = DistributedDataParallel(model, init_sync=False)  # all ranks have the same parameters: no code writes them
    if name == "ddp fp16":
        ddp.register_comm_hook(None, fp16_compress_hook)
    elif name == "ddp with our hook":
        ddp.register_comm_hook(None, ddp_comm_hook(job.communicator.with_algorithm(DEFAULT_ALGORITHM)))
    mean = _sum_of_weights(job) / job.communicator.world_size
    return Step(ddp, list(model.parameters()), nothing, ddp.zero_grad, mean, model.begin)


def _horovod(job: Job, model: CostlessModel, horovod: Any, wrong: dict[str, int]) -> Contestant:
    """Make Horovod's contestant, started for each round of repetitions, with one step to warm up."""
    parameters = list(model.parameters())
    made: list[Step] = []

    def step() -> Step:
        if not made:
            optimizer = horovod.DistributedOptimizer(
                torch.optim.SGD(parameters, lr=0.0), named_parameters=model.named_parameters()
            )
            mean = _sum_of_weights(job) / job.communicator.world_size
            made.append(Step(model, parameters, optimizer.synchronize, model.zero_grad, mean, model.begin))
        return made[0]

    def enter() -> None:
        horovod.init()
        step().prepare()
        step().run()

    def finish() -> None:
        wrong["horovod"] += step().count_wrong()

    return Contestant(
        "horovod",
        lambda: step().run(),
        prepare=lambda: step().prepare(),
        finish=finish,
        enter=enter,
        leave=horovod.shutdown,
        round=HOROVOD_ROUND,
    )


if __name__ == "__main__":
    main()
