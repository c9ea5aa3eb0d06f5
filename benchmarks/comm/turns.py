"""Contestants that take turns at the same work in one job, and the cost of each repetition."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.comm import links
from benchmarks.comm.job import Job
from benchmarks.record import spread


def nothing() -> None:
    """Do nothing, for contestants without such a step."""


@dataclass(frozen=True)
class Contestant:
    """One way to do the same work. All ranks make the same calls."""

    name: str
    run: Callable[[], None]
    """The timed part."""
    prepare: Callable[[], object] = nothing
    """Runs before each repetition, not timed."""
    finish: Callable[[], object] = nothing
    """Runs after each repetition, not timed."""
    enter: Callable[[], object] = nothing
    """Runs before a round of repetitions: for peers with threads that would disturb others at their turns."""
    leave: Callable[[], object] = nothing
    round: int = 1
    """Repetitions in a row."""


@dataclass(frozen=True)
class Repetition:
    """One repetition of one contestant, over all ranks."""

    seconds: float
    """From the common start to the slowest rank's end."""
    cpu_seconds: float
    """Over all ranks, user and system; without the kernel's network work in interrupts."""
    node_bytes: tuple[int, ...]
    """Sent over each node's link, by the kernel's counters, headers and acknowledgements included."""


def take_turns(job: Job, contestants: Sequence[Contestant], *, repetitions: int) -> dict[str, list[Repetition]]:
    """Repeat each contestant's work, one repetition of each in turn, so that a slow spell affects all. Collective.

    Every turn has another order, so that no contestant always follows the same one. A contestant with round=n makes n
    repetitions in a row in every n-th turn.
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
    leaders = job.communicator.connection.topology.leaders
    return {
        name: [_combine([ranks[name][i] for ranks in everyone], leaders=leaders) for i in range(repetitions)]
        for name in mine
    }


def _repeat_once(job: Job, contestant: Contestant) -> list[Any]:
    contestant.prepare()
    sent = links.read_sent_bytes(job.interface)
    job.meet()
    cpu, start = time.process_time(), time.perf_counter()
    contestant.run()
    seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    job.meet()
    sent = links.read_sent_bytes(job.interface) - sent
    contestant.finish()
    return [seconds, cpu, sent]


def _combine(ranks: Sequence[Sequence[Any]], *, leaders: Sequence[int]) -> Repetition:
    """Combine (seconds, CPU seconds, bytes) of every rank to those of the repetition."""
    seconds, cpu_seconds, sent = zip(*ranks, strict=True)
    return Repetition(max(seconds), sum(cpu_seconds), tuple(sent[leader] for leader in leaders))


def describe_repetitions(repetitions: Sequence[Repetition], *, loops: int = 1) -> dict[str, Any]:
    """Describe the facts of one contestant's repetitions for the record; each made the work `loops` times."""
    seconds = [each.seconds / loops for each in repetitions]
    return {
        "seconds": spread(seconds),
        "each_seconds": seconds,
        "loops": loops,
        "cores_used": statistics.median(each.cpu_seconds / each.seconds for each in repetitions),
        "node_bytes": statistics.median(max(each.node_bytes) / loops for each in repetitions),
    }
