"""Find faults that prevent measuring in a preflight: absent ranks, duplicate host names, missing GPUs."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bigbatch.comm.rendezvous.environ import step_hosts
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.tools.preflight.findings import NodeFinding
from bigbatch.words import name_ranks, spans

MEET_SECONDS = 12.0
"""Seconds to wait for ranks at first; with_starts adds to it."""
STARTS_PER_SECOND = 40.0
"""Ranks of a job that start in a second on healthy nodes, at least: thousands load the same files."""
REPORT_SECONDS = 10.0
"""Further seconds that present ranks wait for rank 0's report of absent ones."""
LEAVE_SECONDS = 2.0
_ABSENT = "preflight/absent"


@dataclass(frozen=True)
class NodeAddress:
    """Address of a node, and the devices of its ranks. All ranks gather it from all nodes, so it is short."""

    rank: int
    """First rank there."""
    host: str
    address: str
    port: int
    machine: str
    """Id of its machine, whose cores several nodes share if they are emulated."""
    num_gpus: int
    """GPUs that its ranks see; 0 if they use the CPU by choice."""
    complaint: str | None
    """Why its ranks have no device."""


def with_starts(seconds: float, *, world_size: int) -> float:
    """Return a time limit that also allows for the start of so many ranks."""
    return seconds + world_size / STARTS_PER_SECOND


def absent_ranks(control: JobControl) -> list[int]:
    """List the ranks that are absent at the time limit; equal on all present ranks. Collective over these."""
    missing, seconds = list(range(control.world_size)), with_starts(MEET_SECONDS, world_size=control.world_size)
    if control.rank == 0:
        deadline = time.monotonic() + seconds
        while missing := [rank for rank in missing if not control.has_met(rank)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        # through the store: a gather would wait for the absent ranks
        control.store.set(_ABSENT, json.dumps(missing))
    control.timeout_seconds = seconds + REPORT_SECONDS
    return list(json.loads(control.read(_ABSENT, what="meeting of every node")))


def absence_findings(absent: Sequence[int], control: JobControl) -> list[NodeFinding]:
    """Return a finding on absent ranks, with their nodes if Slurm knows these; [] without absent ranks."""
    if not absent:
        return []
    came = {control.host_of(rank) for rank in range(control.world_size) if rank not in absent}
    hosts = tuple(host for host in step_hosts() if host not in came)
    where = f", on {', '.join(hosts)}" if hosts else ""
    ranks = f"rank{'s' if len(absent) > 1 else ''} {spans(absent)}"
    remedy = "see whether its processes started, or hang on storage"
    seconds = with_starts(MEET_SECONDS, world_size=control.world_size)
    return [NodeFinding(f"no answer from {ranks}{where} within {seconds:.0f} s: {remedy}", hosts)]


def wait_for_report(control: JobControl) -> None:
    """Wait until rank 0 has reported absent ranks: a launcher ends all ranks when the first one exits."""
    if control.rank == 0:
        control.store.set(f"{_ABSENT}/told", "1")
        time.sleep(LEAVE_SECONDS)  # rank 0 holds the store, which the others still read
    else:
        control.read(f"{_ABSENT}/told", what="outcome of the preflight")


def host_faults(places: Sequence[NodeAddress]) -> list[NodeFinding]:
    """Return findings on illegal host names, and on nodes without the GPUs that the others have. Pure."""
    found = []
    for host, count in Counter(place.host for place in places).items():
        if count > 1:
            ranks = name_ranks([place.rank for place in places if place.host == host])
            found.append(NodeFinding(f"{count} nodes have the host name {host} ({ranks}): give each its own host name"))
    counts = Counter(place.num_gpus for place in places)
    # of two equally frequent counts the larger: GPUs go missing, none appear
    usual = max(counts, key=lambda number: (counts[number], number))
    for place in places:
        if place.num_gpus < usual:
            remedy = "look at nvidia-smi and the kernel's log there"
            found.append(NodeFinding.at(place.host, f"{place.num_gpus} GPUs, elsewhere {usual}: {remedy}"))
        elif place.complaint:
            found.append(NodeFinding(place.complaint))
    return found
