"""Rendezvous: rank 0 opens the job's key-value store, and all ranks connect to it."""

import socket
import uuid
from dataclasses import replace
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from bigbatch.comm.rendezvous.addresses import addresses_of, own_address
from bigbatch.comm.rendezvous.bounded_store import BoundedStore, answer_within, wait_until
from bigbatch.comm.rendezvous.environ import SECRET_VARIABLE, ProcessEnv
from bigbatch.comm.rendezvous.job_store import JobStore, KeyValue, StoreConnections, start_store
from bigbatch.comm.rendezvous.late_ranks import reporting_late
from bigbatch.comm.rendezvous.launcher import MPI_LAUNCHERS
from bigbatch.comm.rendezvous.limits import GRACE_SECONDS
from bigbatch.comm.rendezvous.ports import BACKLOG, adopt
from bigbatch.comm.rendezvous.secret import AuthenticationError
from bigbatch.errors import CommError, first_line, tell
from bigbatch.parts import load
from bigbatch.words import name_ranks

_TOKENS = "bigbatch/tokens"
PROBE_SECONDS = 5.0
"""Time for the first connection to torchrun's store, which only checks that something listens."""

_met: dict[tuple[str, int] | None, tuple[StoreConnections, ProcessEnv]] = {}
"""Rendezvous that this process has joined, by the launcher's address or None: a port can be opened only once."""


class TorchrunGone(RuntimeError):
    """Nothing listens where torchrun serves its store."""


def open_store(
    env: ProcessEnv, prefix: str, *, timeout_seconds: float, meeting_seconds: float, warn_seconds: float
) -> tuple[KeyValue, str, ProcessEnv]:
    """Run the rendezvous. Return the job's store, its holder's name, and env completed with address and secret.

    Under mpirun, address and secret are unknown before. meeting_seconds: the longest time between the first and the
    last rank's start; timeout_seconds limits later waits. warn_seconds: when each host names the ranks that it awaits.
    """
    if env.world_size == 1:
        return BoundedStore(HashStore(), seconds=timeout_seconds), "rank 0", env
    if dist.is_initialized():  # a user's script has made a process group already
        store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        return BoundedStore(store, seconds=timeout_seconds), "the default process group", env
    if env.master not in _met:
        met = env
        with reporting_late(warn_seconds, lambda: _describe_wait(met)):
            if env.master is None and env.launcher in MPI_LAUNCHERS:
                met = load("bigbatch.comm.rendezvous.by_mpi.meet_by_mpi")(env, timeout_seconds=meeting_seconds)
            connections = rendezvous(met, timeout_seconds=meeting_seconds, warn_seconds=warn_seconds)
        _met[env.master] = connections, replace(met, secret=connections.secret)
    connections, met = _met[env.master]
    # numbers: a rank that joins later connects under another number than its rank
    return JobStore(connections, prefix, seconds=timeout_seconds, numbers=range(env.world_size)), "rank 0", met


def _describe_wait(env: ProcessEnv) -> str:
    """Return what this host's first rank waits for before it has reached the store; "" if nothing, and on other ranks.

    Rank 0 waits only while it looks for the meeting point by MPI. With torchrun, meet_in_session names late ranks.
    """
    if env.local_rank != 0 or (env.rank == 0 and env.master is not None) or (env.rank and env.master_runs):
        return ""
    where = f", which has opened no rendezvous at {env.master[0]}:{env.master[1]}" if env.master else ""
    return f"rank {env.rank} on {env.host} waits for {f'rank 0{where}' if env.rank else 'the other ranks to start'}"


def rendezvous(env: ProcessEnv, *, timeout_seconds: float, warn_seconds: float) -> StoreConnections:
    """Connect to the job's key-value store; rank 0 first starts the store's process. Raises: CommError."""
    if env.master is None:
        raise CommError(
            f"rank {env.rank} of {env.world_size} has no meeting point: set both MASTER_ADDR and MASTER_PORT, to an "
            "address and a free port of rank 0's host, for all ranks"
        )
    address, port = env.master
    if env.local_rank == 0 and not addresses_of(address):
        tell(
            f"rank {env.rank} on {env.host}: cannot resolve MASTER_ADDR={address}; retrying for up to "
            f"{timeout_seconds:g} s (the longer of meeting_seconds and timeout_seconds). If the name is wrong, "
            "stop the job and correct MASTER_ADDR"
        )
    try:
        if env.master_runs:
            return _meet_by_torchrun(env, timeout_seconds=timeout_seconds, warn_seconds=warn_seconds)
        if env.rank == 0:
            # DNS may learn a pod's name some seconds after its start
            wait_until(lambda: bool(addresses_of(address)), timeout_seconds)
            return _start_store(env, address, port, timeout_seconds=timeout_seconds)
        return StoreConnections(address, port, env.secret, rank=env.rank, timeout_seconds=timeout_seconds)
    except (OSError, RuntimeError) as error:
        raise CommError(
            f"rank {env.rank} on {env.host}: no rendezvous at {address}:{port}: {first_line(error)}; "
            f"{_remedy(env, address, error, seconds=timeout_seconds)}"
        ) from error


def _start_store(env: ProcessEnv, address: str, port: int, *, timeout_seconds: float) -> StoreConnections:
    held = None if env.listener is None else adopt(env.listener, port=port)
    listener = held or listen(address, port, is_one_host=env.is_one_host)
    if not env.secret:
        where = f"{address}:{listener.getsockname()[1]}"
        tell(
            f"this job has no secret, so any process that reaches {where} can take part in it: start it by bigbatch "
            f"launch, or set {SECRET_VARIABLE} to the same random text for all ranks"
        )
    return start_store(listener, env.secret, world_size=env.world_size, timeout_seconds=timeout_seconds)


def _meet_by_torchrun(env: ProcessEnv, *, timeout_seconds: float, warn_seconds: float) -> StoreConnections:
    """Publish the address of the job's authenticated store in torchrun's store, to which any process can write.

    torchrun's store outlives the ranks, so each start uses its own session.
    """
    assert env.master is not None
    address, port = env.master
    try:
        socket.create_connection(env.master, timeout=min(timeout_seconds, PROBE_SECONDS)).close()
    except ConnectionRefusedError as error:  # TCPStore would try again, as after any error
        raise TorchrunGone("nothing listens there") from error
    except OSError:
        pass
    # the kernel accepts connections to a stopped process, which then never answers
    theirs = answer_within(
        timeout_seconds + GRACE_SECONDS,
        lambda: TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout_seconds)),
    )
    board = BoundedStore(theirs, seconds=timeout_seconds + GRACE_SECONDS)
    session = meet_in_session(
        board, rank=env.rank, world_size=env.world_size, timeout_seconds=timeout_seconds, warn_seconds=warn_seconds
    )
    key, secret, place = f"{session}/store", env.secret, ""
    is_handed = env.is_one_host and not secret
    if env.rank == 0:
        # if the name resolves to loopback here, other hosts know this host by another address
        here = (
            address
            if _is_loopback_name(address)
            else own_address(is_one_host=env.is_one_host, interface=env.interface, towards=address)
        )
        if is_handed:
            secret, place = load("bigbatch.comm.rendezvous.handed_secret.hand_out")(session)
        connections = _start_store(replace(env, secret=secret), here, 0, timeout_seconds=timeout_seconds)
        board.set(key, f"{here} {connections.port} {place}")
        return connections
    if not wait_until(lambda: board.check([key]), timeout_seconds):
        raise TimeoutError("rank 0 opened no store in time")
    here, own_port, place = board.get(key).decode().split(" ")
    if is_handed:
        secret = load("bigbatch.comm.rendezvous.handed_secret.receive")(session, place)
    return StoreConnections(here, int(own_port), secret, rank=env.rank, timeout_seconds=timeout_seconds)


def meet_in_session(store: KeyValue, *, rank: int, world_size: int, timeout_seconds: float, warn_seconds: float) -> str:
    """Return a session name that is unique to this start of the job and equal on all its ranks. Collective.

    The store outlives the ranks, and no launcher variable identifies a start: each agent of torchrun counts its own
    restarts, and does not count changes of membership. So each rank but rank 0 writes a random token. Rank 0 answers
    every token, also those of earlier starts, with the name of its session, and waits until all ranks have joined it.
    Then all ranks begin. If an earlier rank 0 has answered a rank, that rank follows the later answer.
    After warn_seconds rank 0 prints which ranks are late.
    Raises: TimeoutError naming the missing ranks; errors of the store.
    """
    if rank != 0:
        return _join_session(store, rank, timeout_seconds)
    session = uuid.uuid4().hex
    joined_keys = {rank: f"{session}/rank/{rank}" for rank in range(1, world_size)}
    num_answered = 0

    def have_all_joined() -> bool:
        nonlocal num_answered
        tokens = store.get(_TOKENS).decode().split() if store.check([_TOKENS]) else []
        for token in tokens[num_answered:]:
            store.set(f"bigbatch/answer/{token}", session)
        num_answered = len(tokens)
        return store.check(list(joined_keys.values()))

    def late() -> str:
        return name_ranks([rank for rank, key in joined_keys.items() if not store.check([key])])

    with reporting_late(warn_seconds, lambda: f"rank 0 waits for {named} to start" if (named := late()) else ""):
        if not wait_until(have_all_joined, timeout_seconds):
            raise TimeoutError(f"{late()} did not join in time")
    store.set(f"{session}/begins", "1")
    return session


def _join_session(store: KeyValue, rank: int, timeout_seconds: float) -> str:
    token, session = uuid.uuid4().hex[:16], ""
    store.append(_TOKENS, f"{token} ")
    answer = f"bigbatch/answer/{token}"

    def begins() -> bool:
        nonlocal session
        if store.check([answer]) and (theirs := store.get(answer).decode()) != session:
            session = theirs
            store.set(f"{session}/rank/{rank}", "1")
        return bool(session) and store.check([f"{session}/begins"])

    if not wait_until(begins, timeout_seconds):
        raise TimeoutError("another rank did not join in time" if session else "rank 0 did not join in time")
    return session


def _remedy(env: ProcessEnv, address: str, error: Exception, *, seconds: float) -> str:
    if isinstance(error, TorchrunGone):
        return "torchrun has ended, or MASTER_ADDR is not its host's address"
    if isinstance(error, AuthenticationError):
        return f"start all ranks by one launcher, or set {SECRET_VARIABLE} to the same random text for all of them"
    if env.rank != 0 and not env.is_one_host and _is_loopback_name(address):
        return (
            f"{address} resolves to loopback on {env.host}: set MASTER_ADDR, or give it its own address in /etc/hosts"
        )
    again = ", or submit the job again: its number chooses another port" if env.launcher == "srun" else ""
    advice = "check that rank 0 runs, and that MASTER_ADDR and MASTER_PORT are an address and free port of its host"
    late = "" if env.rank == 0 else f"; if it only started late, raise meeting_seconds={seconds:g}"
    return advice + again + late


def _is_loopback_name(address: str) -> bool:
    """Return whether a name resolves to loopback, as the host's own name does on Debian and Ubuntu."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:  # no name at all
        return False
    return address not in (found, "localhost") and ip_address(found).is_loopback


def listen(address: str, port: int, *, is_one_host: bool = True) -> socket.socket:
    """Open a socket that listens on this address.

    It listens on all interfaces if the job has several hosts and the name resolves to loopback here: the other hosts
    know this host by another address.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if not is_one_host and _is_loopback_name(address):
        where = ("", port)
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(where)
    listener.listen(BACKLOG)
    return listener
