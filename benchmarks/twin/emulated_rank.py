"""One rank of benchmarks.twin.emulated: steps of stated length with gradients over emulated links; bytes counted.

Nothing is computed: forward and backward sleep, so that eight ranks on two cores take the time of eight devices, and
each gradient is ready when the simulator says so. The sums are real.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.comm.gradient_sets import CostlessModel, Pace, count_wrong, start
from benchmarks.comm.job import Job, join, run_rank
from benchmarks.comm.turns import Contestant, take_turns
from benchmarks.record import spread, write_record
from bigbatch.comm.backends.tcp import TcpBackend
from bigbatch.comm.gradients.fusion import PlanSizes
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.launch.simulate.shapes import ModelShape
from bigbatch.launch.simulate.step import backward_of

ALGORITHMS = ("ring", "hierarchical", "sharded")
LOCAL = "local"
"""A step without communication."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=json.loads, required=True, help="JSON: elements, ready_shares, sizes, seconds")
    parser.add_argument("--repetitions", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    run_rank(partial(run, parser.parse_args()))


def run(options: argparse.Namespace) -> None:
    """Run one cluster's steps. Collective. Raises: CommError."""
    job, asked = join(interface=None), options.job
    steps = [_Step(job, name, asked) for name in (*ALGORITHMS, LOCAL)]
    take_turns(job, [step.contestant for step in steps], repetitions=1)
    measured = take_turns(job, [step.contestant for step in steps], repetitions=options.repetitions)
    received = {step.name: _count(job, step) for step in steps if step.name != LOCAL}
    wrong = sum(job.gather(sum(step.num_wrong for step in steps)))
    if job.rank == 0:
        record = {
            "groups": job.communicator.topology.groups,
            "num_wrong": wrong,
            "seconds": {name: spread([each.seconds for each in found]) for name, found in measured.items()},
            "node_bytes": {name: [list(each.node_bytes) for each in found] for name, found in measured.items()},
            "received_bytes": received,
        }
        write_record(options.out, record)
    job.communicator.control.gather_text("", what="the end of all steps")
    for communicator in (*(step.communicator for step in steps), job.communicator):
        communicator.close()


class _Step:
    def __init__(self, job: Job, name: str, asked: dict[str, Any]) -> None:
        shape = ModelShape("", tuple(asked["elements"]), tuple(asked["ready_shares"]), 0.0)
        # the last gradient to be ready is the first parameter's
        order = range(len(shape.num_elements))[::-1]
        backward = backward_of(shape, asked["backward_seconds"])
        pace = Pace([backward.ready_seconds[f"{i}"] for i in order], forward_seconds=asked["forward_seconds"])
        values = {f"gradient {i}": torch.zeros(shape.num_elements[i]) for i in order}
        self.name, self.num_wrong, self._world_size = name, 0, job.communicator.world_size
        self._model = CostlessModel(values, weight=1, pace=pace)
        self.communicator = job.communicator.with_algorithm("ring" if name == LOCAL else name)
        named = list(self._model.named_parameters())
        sizes = vars(PlanSizes(**asked["sizes"]))
        self._reducer = None if name == LOCAL else GradientReducer(named, self.communicator, **sizes, learn_order=False)
        self.contestant = Contestant(name, self.run, prepare=self._prepare, finish=self._check)

    def _prepare(self) -> None:
        if self._reducer:
            self._reducer.zero_grad()
        else:
            self._model.zero_grad()
        self._loss = self._model(start())

    def run(self) -> None:
        """Step: sleep as forward and backward, and wait for the sums."""
        self._model.begin()
        self._loss.backward()
        if self._reducer:
            self._reducer.wait()

    def _check(self) -> None:
        expected = self._world_size if self._reducer else 1
        self.num_wrong += count_wrong(self._model.parameters(), expected=expected)

    def count_once(self) -> None:
        """Step once, off the clock."""
        self._prepare()
        self.run()
        self._check()


def _count(job: Job, step: _Step) -> dict[str, dict[str, int]]:
    """Return the bytes that each rank received from each other in one step, as its kernel counts them. Collective."""
    backend = job.communicator.backend
    if not isinstance(backend, TcpBackend):  # one rank alone has no links
        return {"0": {}}
    job.gather(None)  # the control channel's: no rank sends over the links before all have read
    before = backend.received_bytes()
    job.gather(None)
    step.count_once()
    after = backend.received_bytes()
    told = job.gather({f"{peer}": after[peer] - before.get(peer, 0) for peer in after})
    return {f"{rank}": found for rank, found in enumerate(told)}


if __name__ == "__main__":
    main()
