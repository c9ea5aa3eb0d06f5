"""The quiet line beside the data: how ranks find each other, compare texts, and learn who is missing."""

import re
import socket
import time
from dataclasses import replace
from datetime import timedelta
from ipaddress import ip_address

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from bigbatch.comm.backends.base import CommError, PeerLostError
from bigbatch.comm.environ import MPI_LAUNCHERS, ProcessEnv

ROLL_CALL_SECONDS = 5.0
LINGER_SECONDS = 2.0
"""How much longer the rank that holds the rendezvous lives after a failure, so that the others can still read it."""

_FAILED = "bigbatch/failed"

_connections = 0
"""How many this process has made: several in one job must not read each other's keys."""

_met: dict[tuple[str, int] | None, tuple[Store, str]] = {}
"""The rendezvous that this process has joined already: its port can be opened only once."""


class Control:
    """A key-value store that all ranks reach, and what they tell each other through it.

    Collective: every rank constructs it, in the same order as its other ones. Works beside any backend, and goes
    on working when that one fails. timeout_seconds bounds every wait.
    Raises: CommError where the ranks cannot meet.
    """

    def __init__(self, env: ProcessEnv, *, timeout_seconds: float, interface: str | None = None) -> None:
        global _connections
        _connections += 1
        self.rank, self.world_size, self.host = env.rank, env.world_size, env.host
        self.timeout_seconds = timeout_seconds
        self.library = "control"
        self.store, self._holder = _open_store(env, timeout_seconds, interface=interface)
        self._texts = 0
        self._has_failed = False
        self.store.set(f"bigbatch/host/{self.rank}", env.host)

    def gather_text(self, text: str, *, what: str = "comparison of a text over all ranks") -> list[str]:
        """A short text of every rank, in rank order. Collective.

        Rank 0 collects and publishes, so the cost is linear in ranks; it, which may hold the store, returns last:
        it can fail next without taking the answer with it.
        Raises: PeerLostError naming the missing ranks.
        """
        self._texts += 1
        key = f"bigbatch/text/{self._texts}"
        start = time.monotonic()
        try:
            self.store.set(f"{key}/{self.rank}", text)
            if self.rank == 0:
                all_texts = [self.store.get(f"{key}/{rank}").decode() for rank in range(self.world_size)]
                self.store.set(key, "\0".join(all_texts))
                if self.world_size > 1:
                    self.store.wait([f"{key}/read/{rank}" for rank in range(1, self.world_size)])
                return all_texts
            all_texts = self.store.get(key).decode().split("\0")
            self.store.set(f"{key}/read/{self.rank}", "1")
            return all_texts
        except RuntimeError as error:
            raise self.explain(what, time.monotonic() - start, error) from error

    def heed_others(self, label: str, seconds: float) -> None:
        """While waiting: another rank's failure ends the wait, so that nobody takes this rank for lost."""
        if self._has_failed:
            return  # this rank reports one itself, and is about to say which
        try:
            has_failed = self.store.check([_FAILED])
        except RuntimeError:
            return  # the operation itself is about to fail, and knows more
        if has_failed:
            cause = RuntimeError("another rank reports a failure")
            raise self.explain(label, seconds, cause) from cause

    def give_up(self, label: str, seconds: float) -> None:
        """While waiting for a library that knows no time limit: heed the others, and this connection's own limit."""
        self.heed_others(label, seconds)
        if seconds > self.timeout_seconds:
            raise self.explain(label, seconds, TimeoutError("some rank has not come to it"))

    def explain(self, label: str, seconds: float, error: Exception) -> CommError:
        """What failed, after how long, and which ranks do not answer any more. Takes a few seconds."""
        self._has_failed = True
        who = self._roll_call()
        if self._holder == f"rank {self.rank}":
            time.sleep(LINGER_SECONDS)
        return PeerLostError(
            f"rank {self.rank}: {label} failed after {seconds:.1f} s; {who} ({self.library}: {first_line(error)})"
        )

    def host_of(self, rank: int) -> str:
        """Where a rank runs."""
        return str(self.store.get(f"bigbatch/host/{rank}").decode())

    def _roll_call(self) -> str:
        """Which ranks do not report, after a failure, that they live. Takes at most ROLL_CALL_SECONDS."""
        try:
            self.store.set(f"bigbatch/alive/{self.rank}", "1")
            self.store.set(_FAILED, "1")
            deadline = time.monotonic() + ROLL_CALL_SECONDS
            missing = list(range(self.world_size))
            while missing and time.monotonic() < deadline:
                missing = [r for r in missing if not self.store.check([f"bigbatch/alive/{r}"])]
                time.sleep(0.1)
            places = [f"{rank} on {self.host_of(rank)}" for rank in missing]
        except RuntimeError:
            return f"no answer from {self._holder}, which holds the rendezvous"
        return f"no answer from rank {', '.join(places)}" if places else "all ranks still answer"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without the place in the C++ sources where it was raised."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"^\[[^\]]*\.\w+:\d+\]\s*", "", text.splitlines()[0])


def _open_store(env: ProcessEnv, timeout_seconds: float, *, interface: str | None) -> tuple[Store, str]:
    """The store, and who holds it."""
    timeout = timedelta(seconds=timeout_seconds)
    if env.world_size == 1:
        return HashStore(), "rank 0"
    prefix = f"bigbatch/{_connections}"
    if dist.is_initialized():  # somebody else's script has met already
        store: Store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        store.set_timeout(timeout)
        return store, "the default process group's store"
    if env.master not in _met:
        met = env
        if env.master is None and env.launcher in MPI_LAUNCHERS:
            from bigbatch.comm.backends.mpi import meet_by_mpi

            met = replace(env, master=meet_by_mpi(env, interface=interface))
        _met[env.master] = rendezvous(met, timeout), "torchrun" if env.master_runs else "rank 0"
    shared, holder = _met[env.master]
    store = PrefixStore(prefix, shared)
    store.set_timeout(timeout)
    return store, holder


def rendezvous(env: ProcessEnv, timeout: timedelta) -> Store:
    """The key-value store through which the ranks find each other, bound to one address by rank 0."""
    if env.master is None:
        raise CommError(
            f"{env.launcher} tells ranks no meeting point: install mpi4py (pip install 'bigbatch[mpi]'), or set "
            "MASTER_ADDR and MASTER_PORT for all ranks"
        )
    address, port = env.master
    try:
        if env.master_runs:  # it outlives the ranks: those of a restart must not read what the last ones left
            return PrefixStore(f"attempt/{env.attempt}", TCPStore(address, port, is_master=False, timeout=timeout))
        if env.rank != 0:
            return TCPStore(address, port, is_master=False, timeout=timeout)
        listener = listen(address, port, is_one_host=env.is_one_host)
        return TCPStore(
            address,
            listener.getsockname()[1],
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except (OSError, RuntimeError) as error:
        raise CommError(
            f"rank {env.rank} on {env.host}: no rendezvous at {address}:{port}: {first_line(error)}; check that "
            "rank 0 runs, and that MASTER_ADDR and MASTER_PORT are an address and free port of its host"
        ) from error


def listen(address: str, port: int, *, is_one_host: bool = True) -> socket.socket:
    """A socket that listens on this address alone, not on every interface.

    Except on a host of several whose name leads to its own loopback interface, as Debian and Ubuntu set it up:
    the other hosts know it by another address.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    is_name = address not in (where[0], "localhost")
    if is_name and not is_one_host and ip_address(where[0]).is_loopback:
        where = ("", port)
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(where)
    listener.listen(4096)
    return listener
