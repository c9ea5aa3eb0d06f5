"""Who comes to the preflight, and what rules out measuring: silent nodes, names that two nodes share, missing GPUs."""

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from bigbatch.comm.backends.mpi import meet_by_mpi
from bigbatch.comm.rendezvous.addresses import own_address
from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.environ import ProcessEnv, step_hosts
from bigbatch.trainer.preflight.node import NodeFinding

MEET_SECONDS = 12.0
"""How long ranks are waited for at first."""
ROLL_SECONDS = 10.0
"""How much longer those that came wait for rank 0's word of those that did not."""
LEAVE_SECONDS = 2.0
_ABSENT = "preflight/absent"


@dataclass(frozen=True)
class Attendee:
    """Says where a node is reached, and what its ranks compute on. All ranks know all of these, so they are short."""

    rank: int
    """First rank there."""
    host: str
    address: str
    port: int
    machine: str
    """Nodes of one machine, as emulated ones are, share its cores."""
    num_gpus: int
    """That its ranks see; 0 where they compute on the CPU by choice."""
    complaint: str | None
    """Why its ranks have no device."""


def meet(env: ProcessEnv, *, interface: str | None) -> tuple[str, Control]:
    """Find this host's address, and the line to the others. Raises: CommError where rank 0 is not reached."""
    towards = env.master[0] if env.master else None
    address = own_address(is_one_host=env.is_one_host, interface=interface, towards=towards)
    return address, Control(env, timeout_seconds=MEET_SECONDS, interface=interface, find_master=meet_by_mpi)


def absent_ranks(control: Control) -> list[int]:
    """List those that have not come when time is over; the same list for all that have. Collective of these."""
    missing = list(range(control.world_size))
    if control.rank == 0:
        deadline = time.monotonic() + MEET_SECONDS
        while missing := [rank for rank in missing if not control.has_met(rank)]:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        # by the store and not by a gather, which would wait for the absent ones
        control.store.set(_ABSENT, json.dumps(missing))
    control.timeout_seconds = MEET_SECONDS + ROLL_SECONDS
    return list(json.loads(control.read(_ABSENT, what="meeting of every node")))


def silent(absent: Sequence[int], control: Control) -> list[NodeFinding]:
    """Name the nodes of which no rank came, where Slurm tells their names; else the ranks alone."""
    if not absent:
        return []
    came = {control.host_of(rank) for rank in range(control.world_size) if rank not in absent}
    hosts = tuple(host for host in step_hosts() if host not in came)
    where = f", on {', '.join(hosts)}" if hosts else ""
    ranks = f"rank{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
    remedy = "see whether its processes started, or hang on storage"
    return [NodeFinding(f"no answer from {ranks}{where} within {MEET_SECONDS:g} s: {remedy}", hosts)]


def leave_together(control: Control) -> None:
    """Leave after rank 0 has told, where some are absent: a launcher ends all when the first one leaves."""
    if control.rank == 0:
        control.store.set(f"{_ABSENT}/told", "1")
        time.sleep(LEAVE_SECONDS)  # it holds the line
    else:
        control.read(f"{_ABSENT}/told", what="verdict of the preflight")


def misfits(places: Sequence[Attendee]) -> list[NodeFinding]:
    """Find names that are no names, and nodes without the GPUs that the others have. Pure."""
    found = []
    for host, count in Counter(place.host for place in places).items():
        if count > 1:
            ranks = ", ".join(str(place.rank) for place in places if place.host == host)
            found.append(
                NodeFinding(f"{count} nodes call themselves {host}, of ranks {ranks}: give each a host name of its own")
            )
    counts = Counter(place.num_gpus for place in places)
    # of two equally frequent counts the larger: GPUs go missing, none appear
    usual = max(counts, key=lambda number: (counts[number], number))
    for place in places:
        if place.num_gpus < usual:
            found.append(
                NodeFinding(
                    f"{place.host}: {place.num_gpus} GPUs, elsewhere {usual}: look at nvidia-smi and the kernel's log "
                    "there",
                    (place.host,),
                )
            )
        elif place.complaint:
            found.append(NodeFinding(place.complaint))
    return found
