"""A new group after a rank failure: the remaining ranks agree on its members, and on the process that holds its store.

Each rank keeps a bound socket, which does not listen. If the store is lost, the first remaining rank opens the next
store on its socket; if that fails, the next rank does. The member list is one value of one store, so no two lists
exist. If two groups cannot reach each other, only the larger one continues (has_quorum); the trainer's claim of the run
folder is the last guard.
"""

import hashlib
import os
import socket
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from bigbatch.awake import awake_seconds
from bigbatch.boot import own_kernel, start_ticks
from bigbatch.comm.rendezvous.addresses import family_of, own_address
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.job_store import JobStore, StoreConnections, start_store
from bigbatch.comm.rendezvous.ports import BACKLOG
from bigbatch.errors import CommError, PeerLostError

HOLDER_SECONDS = 0.5
"""Wait for ranks on a lost store's host, if this host cannot see their processes: most are lost with the store."""
LOOK_SECONDS = 0.02
"""Polling interval while waiting for other ranks."""
CONNECT_SECONDS = 1.0
"""Timeout of one attempt to connect to the next store."""


@dataclass(frozen=True)
class Endpoint:
    """A rank's process, and the address of its bound socket."""

    host: str
    machine: str
    """Name of the machine; differs from host on an emulated node."""
    address: str
    port: int
    kernel: str
    """Boot and PID namespace in which pid is valid; empty if unknown."""
    pid: int
    born: int | None
    rank: int
    """Rank that the launcher assigned; it may differ in a later group."""

    def has_ended(self) -> bool | None:
        """Return whether the process has ended; None if this process cannot see it."""
        if not self.kernel or self.kernel != own_kernel():
            return None
        return start_ticks(self.pid) != self.born


@dataclass(frozen=True)
class Endpoints:
    """The processes of a group in rank order, and this one's bound socket."""

    all: tuple[Endpoint, ...]
    socket: socket.socket


@dataclass(frozen=True)
class Group:
    """A group of ranks: this process's rank in it, its control channel, and the endpoints to meet at if one is lost."""

    env: ProcessEnv
    control: JobControl
    endpoints: Endpoints

    @property
    def store(self) -> JobStore:
        """Return the group's store; every group that can regroup has one."""
        assert isinstance(self.control.store, JobStore)
        return self.control.store


def exchange_endpoints(env: ProcessEnv, control: JobControl) -> Endpoints:
    """Bind this rank's socket, and exchange the addresses. Collective, after all have met."""
    mine, bound = bind_endpoint(env, towards=control.master[0] if control.master else None)
    everyone = control.gather(asdict(mine), what="exchange of the addresses of later stores")
    return Endpoints(tuple(Endpoint(**each) for each in everyone), bound)


def bind_endpoint(env: ProcessEnv, *, towards: str | None) -> tuple[Endpoint, socket.socket]:
    """Bind a socket at which this rank can hold a store. towards: another rank's address."""
    address = own_address(
        is_one_host=env.is_one_host, interface=env.interface, towards=None if env.is_one_host else towards
    )
    bound = socket.socket(family_of(address))
    # without SO_REUSEADDR, by which another process could bind the port, too, and listen there
    bound.bind((address, 0))
    endpoint = Endpoint(
        host=env.host,
        machine=socket.gethostname() if env.plays_host else env.host,
        address=address,
        port=bound.getsockname()[1],
        kernel=own_kernel(),
        pid=os.getpid(),
        born=start_ticks(os.getpid()),
        rank=env.rank,
    )
    return endpoint, bound


def holder_of(control: JobControl) -> int:
    """Return the rank beside which the process of the store runs."""
    return int(control.holder.removeprefix("rank "))


def regroup(group: Group, lost: frozenset[int]) -> Group:
    """Form a new group of the remaining ranks, in their order. Collective over these.

    lost: lost_ranks of the error that ended the group.
    Raises: PeerLostError if the others continue, or may continue, without this rank; CommError without a store.
    """
    env, control, endpoints = group.env, group.control, group.endpoints
    store, rank, holder = group.store, env.rank, holder_of(control)
    remaining = [each for each in range(env.world_size) if each not in lost]
    if rank not in remaining and rank != holder:
        raise excluded_error(env, lost)
    if holder in remaining:  # the store lives: its verdict is the same on all ranks
        members, connections, first = remaining, store.connections, holder
        master = control.master  # the holder's own connection may be over another address
        numbers = [store.numbers[each] if store.numbers else each for each in members]
        if not has_quorum(members, _silent_ranks(group, members, lost)):
            members = []
    else:
        members, connections, first = _meet_at_next_store(group, lost)
        numbers, master = members, (connections.address, connections.port)
    if not members:
        raise PeerLostError(
            f"rank {rank} on {env.host} reaches too few of the {env.world_size} ranks: those that it does not reach "
            "may continue without it, so this process ends"
        )
    if rank not in members:
        raise excluded_error(env, frozenset(range(env.world_size)).difference(members))
    # ranks that disagree about the members never meet
    prefix = prefix_after(store.prefix, ">", members)
    return form_group(
        replace(env, rank=members.index(rank), master=master, secret=control.secret, former_rank=env.launched_as),
        replace(endpoints, all=tuple(endpoints.all[each] for each in members)),
        JobStore(connections, prefix, seconds=control.timeout_seconds, numbers=numbers),
        holder=members.index(first),
        warn_seconds=control.warn_seconds,
    )


def prefix_after(former: str, change: str, ranks: Sequence[int]) -> str:
    """Return the prefix of a group's store keys: a hash, so its length does not grow with each regrouping."""
    return hashlib.sha256(f"{former}{change}{','.join(map(str, ranks))}".encode()).hexdigest()[:32]


def form_group(env: ProcessEnv, endpoints: Endpoints, store: JobStore, *, holder: int, warn_seconds: float) -> Group:
    """Return the group of these endpoints. env: this process's rank in it, and its store's address and secret."""
    machine = endpoints.all[env.rank].machine
    here = [rank for rank, each in enumerate(endpoints.all) if each.machine == machine]
    env = replace(env, world_size=len(endpoints.all), local_rank=here.index(env.rank), local_size=len(here))
    control = JobControl(env, timeout_seconds=store.seconds, warn_seconds=warn_seconds, joined=(store, holder))
    return Group(env, control, endpoints)


def excluded_error(env: ProcessEnv, lost: frozenset[int]) -> PeerLostError:
    """Return the error for a rank that the other ranks have excluded."""
    error = PeerLostError(
        f"rank {env.rank} on {env.host} did not answer in time, so the other ranks continue without it. "
        "This process ends"
    )
    error.lost_ranks = lost | {env.rank}
    return error


def has_quorum(members: Collection[int], silent: Collection[int]) -> bool:
    """Return whether members continue without the silent ranks, which may form another group.

    Of two groups that find each other silent, the larger one continues; of equal ones, the one with the lowest rank.
    """
    return (len(members), -min(members)) > (len(silent), -min(silent, default=0))


def _silent_ranks(group: Group, members: Sequence[int], lost: frozenset[int]) -> set[int]:
    """Return the ranks outside members whose processes are not known to have ended."""
    state, holder = group.control.detector.log.state, holder_of(group.control)
    known = set(state.crashed)
    if group.env.rank not in lost:  # live ranks, too, close their connections to the store of an excluded rank
        known |= state.gone
    if holder not in known | {group.env.rank, *members} and _has_closed(group):
        known.add(holder)
    silent = set[int]()
    for each in set(range(group.env.world_size)).difference(members):
        has_ended = group.endpoints.all[each].has_ended()
        if not (each in known if has_ended is None else has_ended):
            silent.add(each)
    return silent


def _has_closed(group: Group) -> bool:
    """Return whether the host refuses connections to the store: the store ends with its holder."""
    connections = group.store.connections
    with suppress(OSError):
        try:
            socket.create_connection((connections.address, connections.port), CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            return True
    return False


def order_of_holders(endpoints: Sequence[Endpoint], lost: frozenset[int], *, holder: int) -> list[int]:
    """Return the ranks that may hold the next store: those of other hosts first, the lost holder last."""
    left = [each for each in range(len(endpoints)) if each not in lost and each != holder]
    return [*sorted(left, key=lambda each: endpoints[each].host == endpoints[holder].host), holder]


def _meet_at_next_store(group: Group, lost: frozenset[int]) -> tuple[list[int], StoreConnections, int]:
    """Open or find the next store, and agree there on the members.

    Returns: the members, none without a quorum; the store; and the rank that holds it.
    """
    env, control, endpoints = group.env, group.control, group.endpoints
    reasons, deadline = [], awake_seconds()
    for first in order_of_holders(endpoints.all, lost, holder=holder_of(control)):
        # a rank that could not open a store waits longer for the next one: the others still wait for its own
        deadline = max(deadline, awake_seconds()) + control.timeout_seconds
        try:
            if first == env.rank:
                return *_open_next_store(group, lost), first
            connections = _connect_to(endpoints.all[first], control, rank=env.rank, deadline=deadline)
            store = _members_store(connections, group)
            store.set(f"here/{env.rank}", "1")
            # twice: the first rank may wait once for another one, and once for its own requests
            if store.wait_for("members", seconds=2 * control.timeout_seconds):
                return list(map(int, store.get("members").split())), connections, first
        except (OSError, RuntimeError) as error:  # RuntimeError: the store has ended, or does not know the secret
            reasons.append(f"rank {first}: {error}")
    raise CommError(f"rank {env.rank} on {env.host} cannot reach any rank that opens a new store: {'; '.join(reasons)}")


def _members_store(connections: StoreConnections, group: Group) -> JobStore:
    return JobStore(connections, f"{group.store.prefix}>members", seconds=group.control.timeout_seconds)


def _connect_to(endpoint: Endpoint, control: JobControl, *, rank: int, deadline: float) -> StoreConnections:
    """Connect to the store at an endpoint, once it listens. Raises: OSError; AuthenticationError."""
    while not endpoint.has_ended():
        try:
            return StoreConnections(
                endpoint.address, endpoint.port, control.secret, rank=rank, timeout_seconds=CONNECT_SECONDS
            )
        except OSError:  # that rank may be in a long step, and may not have noticed the failure yet
            if awake_seconds() > deadline:
                raise
    raise ConnectionError("its process has ended")


def _open_next_store(group: Group, lost: frozenset[int]) -> tuple[list[int], StoreConnections]:
    """Open the next store, and publish the ranks that connect to it as members; none if they have no quorum.

    Waits for each rank to connect, until its process is known to have ended, or for comm.timeout_seconds: the rank may
    be in a long step. Waits only HOLDER_SECONDS for lost ranks, and for ranks on the lost store's host whose processes
    this host cannot see. If only the store of a holder is lost, the holder gets the full time.
    Raises: OSError, also if the port of a second store is taken by now; RuntimeError if the store ends.
    """
    env, control, endpoints = group.env, group.control, group.endpoints
    listener, started, own = endpoints.socket, awake_seconds(), endpoints.all[env.rank]
    if listener.fileno() < 0:  # this rank has run a store there, which has ended
        listener = socket.create_server((own.address, own.port), family=family_of(own.address))
    listener.listen(BACKLOG)
    # only now, when no other process can listen there, too: connections of an ended store would keep the port
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    limit = control.timeout_seconds
    connections = start_store(listener, control.secret, world_size=env.world_size, timeout_seconds=limit, rank=env.rank)
    store = _members_store(connections, group)
    holder = holder_of(control)
    awaited = {each for each in range(env.world_size) if each != env.rank and (each not in lost or each == holder)}
    come, gone = set[int](), frozenset[int]()
    has_lost_store_alone = endpoints.all[holder].has_ended() is False and _has_closed(group)
    brief = lost - {holder} if has_lost_store_alone else lost
    while awaited:
        gone = store.tail("members", 0).gone
        for each in sorted(awaited):
            endpoint, waited = endpoints.all[each], awake_seconds() - started
            has_ended = endpoint.has_ended()
            is_short = each in brief or (has_ended is None and endpoint.host == endpoints.all[holder].host)
            if store.check([f"here/{each}"]):
                come.add(each)
            elif not (has_ended or each in gone or waited > (HOLDER_SECONDS if is_short else control.timeout_seconds)):
                continue
            awaited.discard(each)
        time.sleep(LOOK_SECONDS if awaited else 0.0)
    members = sorted({*come, env.rank})
    if not has_quorum(members, _silent_ranks(group, members, lost) - gone):
        members = []
    store.set("members", " ".join(map(str, members)))
    return members, connections
