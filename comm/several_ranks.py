"""Join the other ranks of a job: control channel, checks, watch and transport, before an algorithm is chosen."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from bigbatch.comm.backends.base import Backend
from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.connect import HEALING, TRANSPORTS
from bigbatch.comm.connection import Connection
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.job_store import JobStore
from bigbatch.comm.rendezvous.places import meet
from bigbatch.comm.rendezvous.topology import make_topology
from bigbatch.comm.rendezvous.watch import Watch
from bigbatch.parts import load, load_named

if TYPE_CHECKING:
    from bigbatch.comm.rendezvous.regroup import Group


def join(
    env: ProcessEnv,
    library: str,
    *,
    device: torch.device,
    gpu: str,
    group_size: int | None,
    interface: str | None,
    heals: bool,
    former: "Group | None",
    limits: dict[str, Any],
) -> Connection:
    """Return the connection to the other ranks, by the named backend. Collective.

    gpu: UUID of this rank's GPU if no other rank may use it, else "". former: the result of regroup(), if any. limits:
    timeout_seconds, warn_seconds and meeting_seconds. Other arguments: those of connect().
    Raises: CommError if the ranks cannot meet or connect, or contradict each other; ValueError for a group_size.
    """
    env = replace(env, interface=interface)
    control = former.control if former else JobControl(env, **limits)
    control.library = library
    places = meet(env, control, gpu=gpu)
    topology = make_topology([each.node for each in places], rank=env.rank, group_size=group_size)
    endpoints = former.endpoints if former else None
    can_heal = library in HEALING and isinstance(control.store, JobStore)
    if heals and endpoints is None and can_heal:
        endpoints = load("bigbatch.comm.rendezvous.regroup.exchange_endpoints")(env, control)
    heals = control.detector.heals = endpoints is not None
    if env.world_size == 1:  # the last one of a group that has lost ranks
        return Connection(env, control, SingleBackend(is_alone=False), topology, endpoints=endpoints)
    watch = Watch(control, ends_job=library == "nccl")
    make = load_named(TRANSPORTS, library, key="comm.backend")
    # NCCL connects without a time limit: a rank that freezes after the meeting would block the others forever
    try:
        with watch.during(f"connection of {env.world_size} ranks by {library}"):
            backend: Backend = make(env, control, library=library, device=device, heals=heals)
    except BaseException:
        watch.close()
        raise
    watch.follow(backend.oldest)
    return Connection(env, control, backend, topology, watch=watch, endpoints=endpoints)
