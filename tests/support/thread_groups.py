"""Groups of ranks that are threads of this process, and can form other groups: each has its endpoint and control."""

import os
import socket
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor

from bigbatch.boot import own_kernel, start_ticks
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.job_store import JobStore, StoreConnections, start_store
from bigbatch.comm.rendezvous.regroup import Endpoint, Endpoints, Group

SECRET = b"of this test"
PUBLISHED = ("127.0.0.1", 1)
"""Address of the store for other hosts, by which nothing connects here."""


def env_of(rank: int, world_size: int) -> ProcessEnv:
    """The environment of a rank on one host."""
    return ProcessEnv("torchrun", rank, world_size, rank, world_size, "here", PUBLISHED, secret=SECRET)


def groups_of(
    num_ranks: int, *, ended: Collection[int] = (), ranks: Iterable[int] | None = None, holder: int = 0
) -> tuple[StoreConnections, list[Group]]:
    """The connections to a store, and what each of the ranks knows; ended: ranks whose processes have ended."""
    connections = start_store(socket.create_server(("127.0.0.1", 0)), SECRET, world_size=num_ranks, timeout_seconds=60)
    sockets, pid = [socket.socket() for _ in range(num_ranks)], os.getpid()
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    endpoints = tuple(
        Endpoint(
            *("here", "here", "127.0.0.1", each.getsockname()[1], own_kernel(), pid),
            (start_ticks(pid) or 0) - (rank in ended),
            rank,
        )
        for rank, each in enumerate(sockets)
    )
    groups = []
    for rank in range(num_ranks) if ranks is None else ranks:
        store = JobStore(connections, "job", seconds=60, numbers=range(num_ranks))
        control = JobControl(env_of(rank, num_ranks), timeout_seconds=60, joined=(store, holder))
        groups.append(Group(env_of(rank, num_ranks), control, Endpoints(endpoints, sockets[rank])))
    return connections, groups


def gather(groups: Iterable[Group]) -> list[list[str]]:
    """What each rank gathers of all."""
    groups = list(groups)
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(lambda group: group.control.gather_text(f"of {group.env.rank}"), groups))
