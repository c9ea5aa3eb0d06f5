"""One rank of benchmarks.twin.emulated: steps of stated length with gradients over emulated links; bytes counted.

Nothing is computed: forward and backward sleep, so that eight ranks on two cores take the time of eight devices, and
each gradient is ready when the simulator says so. The sums are real.
"""

import argparse
import json
import socket
import struct
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.comm.gradient_sets import CostlessModel, Pace
from benchmarks.comm.gradients import Step
from benchmarks.comm.job import Job, join, run_rank
from benchmarks.comm.turns import Contestant, nothing, take_turns
from benchmarks.record import spread, write_record
from bigbatch.comm.backends.tcp import TcpBackend
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.fusion import PlanSizes
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.tools.simulate.shapes import ModelShape
from bigbatch.tools.simulate.step import backward_of

ALGORITHMS = ("ring", "hierarchical", "sharded")
LOCAL = "local"
"""A step without communication."""
RECEIVED = struct.Struct("=Q")
RECEIVED_AT = 128
"""Offset of tcpi_bytes_received in Linux's struct tcp_info."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--job", type=json.loads, required=True, help="JSON: elements, ready_shares, sizes, seconds")
    parser.add_argument("--repetitions", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    run_rank(partial(run, parser.parse_args()))


def run(options: argparse.Namespace) -> None:
    """Run one cluster's steps. Collective. Raises: CommError."""
    job, asked = join(interface=None), options.job
    steps = {name: _make_step(job, name, asked) for name in (*ALGORITHMS, LOCAL)}
    wrong = dict.fromkeys(steps, 0)
    contestants = [step.contestant(name, wrong) for name, (step, _) in steps.items()]
    take_turns(job, contestants, repetitions=1)
    measured = take_turns(job, contestants, repetitions=options.repetitions)
    received = {each.name: _count(job, each) for each in contestants if each.name != LOCAL}
    num_wrong = sum(job.gather(sum(wrong.values())))
    if job.rank == 0:
        record = {
            "groups": job.communicator.connection.topology.groups,
            "num_wrong": num_wrong,
            "seconds": {name: spread([each.seconds for each in found]) for name, found in measured.items()},
            "node_bytes": {name: [list(each.node_bytes) for each in found] for name, found in measured.items()},
            "received_bytes": received,
        }
        write_record(options.out, record)
    job.communicator.connection.control.gather_text("", what="the end of all steps")
    for communicator in (*(each for _, each in steps.values()), job.communicator):
        communicator.close()


def _make_step(job: Job, name: str, asked: dict[str, Any]) -> tuple[Step, Communicator]:
    shape = ModelShape("", tuple(asked["elements"]), tuple(asked["ready_shares"]), 0.0)
    # gradients become ready in reverse order: the first parameter's comes last
    order = range(len(shape.num_elements))[::-1]
    backward = backward_of(shape, asked["backward_seconds"])
    pace = Pace([backward.ready_seconds[f"{i}"] for i in order], forward_seconds=asked["forward_seconds"])
    model = CostlessModel({f"gradient {i}": torch.zeros(shape.num_elements[i]) for i in order}, weight=1, pace=pace)
    communicator, parameters = job.communicator.with_algorithm("ring" if name == LOCAL else name), [*model.parameters()]
    if name == LOCAL:
        return Step(model, parameters, nothing, model.zero_grad, 1, model.begin), communicator
    sizes = vars(PlanSizes(**asked["sizes"]))
    reducer = GradientReducer([*model.named_parameters()], communicator, **sizes, learn_order=False)
    return Step(model, parameters, reducer.wait, reducer.zero_grad, communicator.world_size, model.begin), communicator


def _count(job: Job, step: Contestant) -> dict[str, dict[str, int]]:
    """Return the bytes of one step from each rank to each other one, as the receiver's kernel counts. Collective."""
    backend = job.communicator.transport.backend
    if not isinstance(backend, TcpBackend):  # one rank alone has no links
        return {"0": {}}
    job.gather(None)  # over the control channel: no rank sends over the links before all have read their counters
    before = _received_bytes(backend)
    job.gather(None)
    for part in (step.prepare, step.run, step.finish):
        part()
    after = _received_bytes(backend)
    told = job.gather({f"{peer}": after[peer] - before.get(peer, 0) for peer in after})
    return {f"{rank}": found for rank, found in enumerate(told)}


def _received_bytes(backend: TcpBackend) -> dict[int, int]:
    """Return the bytes from each rank, as Linux counts the stream: each byte once, without headers."""
    size = RECEIVED_AT + RECEIVED.size
    sockets = {peer: link.socket for peer, link in backend._links._links.items()}
    infos = {peer: each.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size) for peer, each in sockets.items()}
    return {peer: RECEIVED.unpack_from(info, RECEIVED_AT)[0] for peer, info in infos.items()}


if __name__ == "__main__":
    main()
