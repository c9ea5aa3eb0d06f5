"""The quiet line beside the data: how ranks find each other, compare texts, and learn who is missing."""

import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from ipaddress import ip_address
from typing import Protocol, TypeVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from bigbatch.comm.rendezvous.bounded_store import BoundedStore, NoAnswerError, answer_within
from bigbatch.comm.rendezvous.environ import MPI_LAUNCHERS, ProcessEnv
from bigbatch.comm.rendezvous.roll_call import LATE, LOST, ROLL_CALL_SECONDS, RollCall, host_of
from bigbatch.comm.rendezvous.session import meet_in_session
from bigbatch.errors import CommError, PeerLostError

T = TypeVar("T")

HEED_SECONDS = 1.0
"""Longest wait, in the midst of another one, for the store's answer whether a rank has failed."""
GRACE_SECONDS = 1.0
"""How much later than a limit of torch's own we give up: torch knows more."""

PIECE_BYTES = 4 << 20
"""torch's store ends a connection over which more than 8 MB come at once."""
SHORTEST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.0005, 0.02
"""Between two questions to the store for a key that is not there yet."""

_LEFT = "bigbatch/left"

_connections = 0
"""How many this process has made: several in one job must not read each other's keys."""

Master = tuple[str, int] | None
"""Address and port of the rendezvous; None where there is none of ours."""


class FindMaster(Protocol):
    """Agrees with the other ranks on a meeting point, by other means than the launcher's variables."""

    def __call__(self, env: ProcessEnv, *, timeout_seconds: float, interface: str | None) -> tuple[str, int]:
        """Agree on an address and free port of rank 0's host, the same on all ranks. Raises: CommError."""
        ...


_met: dict[Master, tuple[Store, str, Master]] = {}
"""The rendezvous that this process has joined already: its port can be opened only once."""


class Control:
    """Keeps a key-value store that all ranks reach, and what they tell each other through it.

    Collective: every rank constructs it, in the same order as its other ones. Works beside any backend, and goes
    on working when that one fails. timeout_seconds bounds every wait, and each request to the store, whose holder may
    be stopped as any other rank. find_master is asked where mpirun, which names
    no meeting point, started the ranks.
    Raises: CommError where the ranks cannot meet.
    """

    def __init__(
        self,
        env: ProcessEnv,
        *,
        timeout_seconds: float,
        find_master: FindMaster,
        interface: str | None = None,
    ) -> None:
        global _connections
        # all ranks make theirs in the same order, so the same number names the same connection
        _connections += 1
        self.rank, self.world_size, self.host = env.rank, env.world_size, env.host
        self.timeout_seconds = timeout_seconds
        self.library = "control"
        store, self.holder, self.master = _open_store(
            env, timeout_seconds, interface=interface, find_master=find_master
        )
        self.store = BoundedStore(store, seconds=timeout_seconds)
        self._texts = 0
        self.roll_call = RollCall(self)
        self._has_failed = False
        self._num_begun = 0
        with self.explained("meeting of all ranks"):
            self.store.set(f"bigbatch/host/{self.rank}", env.host)

    def gather_text(self, text: str, *, what: str = "comparison of a text over all ranks") -> list[str]:
        """Gather a short text of every rank, in rank order. Collective.

        Rank 0 collects and publishes, so the cost is linear in ranks; it, which may hold the store, returns last:
        it can fail next without taking the answer with it.
        Raises: PeerLostError naming the missing ranks.
        """
        with self.explained(what):
            key, all_texts = self._collect(text, what=what)
            if self.rank != 0:
                all_texts = self._take(key, what=what).split("\0")
                self.store.set(f"{key}/read/{self.rank}", "1")
                return all_texts
            self._put(key, "\0".join(all_texts))
            for rank in range(1, self.world_size):
                # rank 0 may hold the store, so it stays until all have read
                self._await(f"{key}/read/{rank}", what=what)
            return all_texts

    def collect_text(self, text: str, *, what: str) -> list[str]:
        """Gather texts for rank 0 alone, for long ones; the others get an empty list. Collective."""
        with self.explained(what):
            return self._collect(text, what=what)[1]

    def tell_all(self, text: str, *, what: str, timeout_seconds: float) -> str:
        """Return the first rank's text on all ranks, which wait for it as long as timeout_seconds. Collective.

        The first one waits for nobody: what comes next shows sooner than any limit that a rank was lost meanwhile.
        Raises: PeerLostError.
        """
        with self.explained(what):
            key = self.next_key()
            if self.rank != 0:
                return self._take(key, what=what, timeout_seconds=timeout_seconds)
            self._put(key, text)
            return text

    def next_key(self) -> str:
        """Name the next exchange, alike on all ranks."""
        self._texts += 1
        return f"bigbatch/text/{self._texts}"

    def _collect(self, text: str, *, what: str) -> tuple[str, list[str]]:
        """Return the key of this exchange, and collect_text's answer."""
        key = self.next_key()
        if self.rank != 0:
            self._put(f"{key}/{self.rank}", text)
            return key, []
        return key, [text, *(self._take(f"{key}/{rank}", what=what) for rank in range(1, self.world_size))]

    def _put(self, key: str, text: str) -> None:
        """Write a text in pieces that the store takes."""
        data = text.encode()
        pieces = [data[i : i + PIECE_BYTES] for i in range(0, len(data), PIECE_BYTES)]
        for number, piece in enumerate(pieces):
            self.store.set(f"{key}/piece/{number}", piece)
        # last: who waits for this key finds all pieces there
        self.store.set(key, str(len(pieces)))

    def _take(self, key: str, *, what: str, timeout_seconds: float | None = None) -> str:
        """Wait for a text and read it."""
        self._await(key, what=what, timeout_seconds=timeout_seconds)
        count = int(self.store.get(key))
        return b"".join(self.store.get(f"{key}/piece/{number}") for number in range(count)).decode()

    def read(self, key: str, *, what: str) -> str:
        """Read a short value that another rank writes, once it is there. Raises: PeerLostError."""
        with self.explained(what):
            self._await(key, what=what)
            return str(self.store.get(key).decode())

    def _await(self, key: str, *, what: str, timeout_seconds: float | None = None) -> None:
        """Wait for a key by asking for it: a store that waits itself serves no other thread of this process."""
        limit = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        start, pause = time.monotonic(), SHORTEST_PAUSE_SECONDS
        heeded, store = start, self.store.within(limit + GRACE_SECONDS)
        while not store.check([key]):
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            now = time.monotonic()
            if now - heeded > 1.0:
                heeded = now
                self.heed_others(what, now - start)
            if now - start > limit:
                raise TimeoutError("some rank has not come to it")

    @contextmanager
    def explained(self, what: str) -> Iterator[None]:
        """Turn what the store or torch raises inside into an error that says who is missing. Raises: PeerLostError."""
        start = time.monotonic()
        try:
            yield
        except CommError:
            raise
        except (RuntimeError, TimeoutError) as error:
            raise self.explain(what, time.monotonic() - start, error) from error

    def begin(self) -> None:
        """Count an operation that all ranks begin."""
        self._num_begun += 1

    def leave(self) -> None:
        """Say, once, that this rank begins no more of them; the others' waits for such end then."""
        self.store.within(ROLL_CALL_SECONDS).append(_LEFT, f"{self.rank}:{self._num_begun} ")

    def _missed_by(self) -> str:
        """Name the ranks that have left before an operation which this one has begun; empty where there is none."""
        store = self.store.within(HEED_SECONDS)
        if not store.check([_LEFT]):
            return ""
        left = (map(int, word.split(":")) for word in store.get(_LEFT).decode().split())
        early = [f"{rank} on {self.host_of(rank)}" for rank, num_begun in left if num_begun < self._num_begun]
        return f"rank {', '.join(early)} ended, or closed its connection, before it" if early else ""

    def heed_others(self, label: str, seconds: float) -> None:
        """End a wait by another rank's failure, or by its end, so that nobody takes this rank for lost."""
        if self._has_failed:
            return  # this rank reports one itself, and is about to say which
        try:
            has_failed = self.roll_call.has_begun(within_seconds=HEED_SECONDS)
            reason = "another rank reports a failure" if has_failed else self._missed_by()
        except RuntimeError:
            return  # the operation itself is about to fail, and knows more; its own limit holds
        if reason:
            cause = RuntimeError(reason)
            raise self.explain(label, seconds, cause) from cause

    def give_up(self, label: str, seconds: float) -> None:
        """Heed, while waiting for a library that knows no time limit, the others, and this connection's own limit."""
        self.heed_others(label, seconds)
        if seconds > self.timeout_seconds:
            raise self.explain(label, seconds, TimeoutError("some rank has not come to it"))

    def bounded(self, label: str, operation: Callable[[], T]) -> T:
        """Run, on a thread of its own, what asks torch's store itself: its limits need the store's answers.

        Raises: what operation raises; PeerLostError after the time limit.
        """
        start = time.monotonic()
        try:
            return answer_within(self.timeout_seconds + GRACE_SECONDS, operation)
        except NoAnswerError:
            late = TimeoutError("some rank has not come to it")
            raise self.explain(label, time.monotonic() - start, late) from None

    def explain(self, label: str, seconds: float, error: Exception) -> CommError:
        """Say what failed, after how long, and which ranks do not answer any more. Takes a few seconds.

        This rank then asks the store for no more; its holder stays until the others have got as far.
        """
        failure = self.describe(label, seconds, error)
        self.roll_call.part()
        return failure

    def describe(self, label: str, seconds: float, error: Exception) -> CommError:
        """Say the same for one who still asks the store for more, and parts from the roll call afterwards."""
        self._has_failed = True
        is_late = isinstance(error, TimeoutError) or "timed out" in str(error).lower()
        # a holder that has not answered for so long is not asked again
        is_silent = isinstance(error, NoAnswerError)
        who = self.roll_call.lose_holder() if is_silent else self.roll_call.call(LATE if is_late else LOST)
        return PeerLostError(
            f"rank {self.rank}: {label} failed after {seconds:.1f} s; {who} ({self.library}: {first_line(error)})"
        )

    def report_own_failure(self) -> None:
        """Let the others' waits end, and their roll call miss this rank; a failure reported before stays.

        The rank that holds the rendezvous stays until the others know, or have had the time to.
        """
        self._has_failed = True
        self.roll_call.report_own_failure()

    def has_met(self, rank: int) -> bool:
        """Tell whether a rank has come to the rendezvous, whatever it does now."""
        return bool(self.store.check([f"bigbatch/host/{rank}"]))

    def host_of(self, rank: int) -> str:
        """Say where a rank runs."""
        return host_of(rank, self.store)


def first_line(error: BaseException) -> str:
    """Cut an error's text to its first line, without the place in the C++ sources where it was raised."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r"^\[[^\]]*\.\w+:\d+\]\s*", "", text.splitlines()[0])


def _open_store(
    env: ProcessEnv, timeout_seconds: float, *, interface: str | None, find_master: FindMaster
) -> tuple[Store, str, Master]:
    """Open the store; return it, who holds it, and where: under mpirun only now known."""
    timeout = timedelta(seconds=timeout_seconds)
    if env.world_size == 1:
        return HashStore(), "rank 0", env.master
    prefix = f"bigbatch/{_connections}"
    if dist.is_initialized():  # somebody else's script has met already
        store: Store = PrefixStore(prefix, dist.distributed_c10d._get_default_store())
        return store, "the default process group's store", env.master
    if env.master not in _met:
        met = env
        if env.master is None and env.launcher in MPI_LAUNCHERS:
            met = replace(env, master=find_master(env, timeout_seconds=timeout_seconds, interface=interface))
        _met[env.master] = rendezvous(met, timeout), "torchrun" if env.master_runs else "rank 0", met.master
    shared, holder, master = _met[env.master]
    return PrefixStore(prefix, shared), holder, master


def rendezvous(env: ProcessEnv, timeout: timedelta) -> Store:
    """Open the key-value store through which the ranks find each other, bound to one address by rank 0."""
    if env.master is None:
        raise CommError(
            f"{env.launcher} tells ranks no meeting point: install mpi4py (pip install 'bigbatch[mpi]'), or set "
            "MASTER_ADDR and MASTER_PORT for all ranks"
        )
    address, port = env.master
    try:
        if env.master_runs:  # it outlives the ranks: those of a restart must not read what the last ones left
            store = _join(address, port, timeout)
            return PrefixStore(_session(store, env, timeout), store)
        if env.rank != 0:
            return _join(address, port, timeout)
        # our own socket, as torch's store would listen on every interface
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
            f"rank {env.rank} on {env.host}: no rendezvous at {address}:{port}: {first_line(error)}; "
            f"{_remedy(env, address)}"
        ) from error


def _session(store: Store, env: ProcessEnv, timeout: timedelta) -> str:
    seconds = timeout.total_seconds()
    bounded = BoundedStore(store, seconds=seconds + GRACE_SECONDS)
    return meet_in_session(bounded, rank=env.rank, world_size=env.world_size, timeout_seconds=seconds)


def _join(address: str, port: int, timeout: timedelta) -> Store:
    """Connect to the store. The system takes in who calls a process that is stopped, and that one says nothing."""
    seconds = timeout.total_seconds() + GRACE_SECONDS
    return answer_within(seconds, lambda: TCPStore(address, port, is_master=False, timeout=timeout))


def _remedy(env: ProcessEnv, address: str) -> str:
    if env.rank != 0 and not env.is_one_host and _leads_back(address):
        return f"{address} leads {env.host} to itself: give it {address}'s own address in /etc/hosts, or by MASTER_ADDR"
    again = ", or submit the job again: its number chooses another port" if env.launcher == "srun" else ""
    words = "check that rank 0 runs, and that MASTER_ADDR and MASTER_PORT are an address and free port of its host"
    return words + again


def _leads_back(address: str) -> bool:
    """Tell whether a name leads to this host's loopback interface, as Debian and Ubuntu set up the host's own."""
    try:
        found = socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:  # no name at all
        return False
    return address not in (found, "localhost") and ip_address(found).is_loopback


def listen(address: str, port: int, *, is_one_host: bool = True) -> socket.socket:
    """Open a socket that listens on this address alone, not on every interface.

    Except on a host of several whose name leads to its own loopback interface: the other hosts know it by another
    address.
    """
    family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    if not is_one_host and _leads_back(address):
        where = ("", port)
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(where)
    # all ranks of a large job may come at once
    listener.listen(4096)
    return listener
