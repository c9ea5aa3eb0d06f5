"""Client of the job's key-value store: torch's Store interface over connections authenticated by the job's secret."""

import os
import select
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store

import bigbatch
from bigbatch.awake import awake_seconds, wait_awake
from bigbatch.comm.rendezvous.bounded_store import BoundedStore, News, NoAnswerError
from bigbatch.comm.rendezvous.secret import RejectedError, authenticate, close_after_fork, receive_exactly
from bigbatch.comm.rendezvous.store_process import DONE, LENGTH, STORE_NAME, pack, split

RETRY_SECONDS = 0.1
"""Pause between two attempts to connect, if the store does not listen yet or has refused the connection."""
MAX_REFUSALS = 3
LONGEST_POLL_SECONDS = 3600.0
START_SECONDS = 60.0
END_SECONDS = 5.0
_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop(1)); from bigbatch.comm.rendezvous.store_process import main; main()"
)

INFINITE = float("inf")
Text = str | bytes


class StoreConnections:
    """Pool of connections to a store's process. Threads may send requests at once, each over its own connection.

    Retries to connect for timeout_seconds, or until has_ended() is true.
    Raises: OSError; RuntimeError if the other end does not know the secret.
    """

    def __init__(
        self,
        address: str,
        port: int,
        secret: bytes,
        *,
        rank: int,
        timeout_seconds: float,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self.address, self.port = address, port
        self.secret, self._rank = secret, rank
        deadline = awake_seconds() + timeout_seconds
        self._idle: list[socket.socket] = []
        self._presence: socket.socket | None = None
        """Connection without requests: it ends only with this process, so the store sees which ranks are alive."""
        num_refusals = 0
        while not self._idle:
            try:
                left = max(RETRY_SECONDS, deadline - awake_seconds())
                self._presence = self._presence or self._connect(left)
                self._idle.append(self._connect(left))
            except (OSError, RejectedError) as error:
                num_refusals += isinstance(error, RejectedError)
                if num_refusals == MAX_REFUSALS or awake_seconds() + RETRY_SECONDS > deadline or has_ended():
                    self.close()
                    raise
                time.sleep(RETRY_SECONDS)

    def ask(self, name: str, *parts: Text, seconds: float = INFINITE) -> bytes:
        """Return the answer to a request.

        Raises: NoAnswerError if none comes within seconds; RuntimeError if the store has ended.
        """
        request = pack(name.encode(), *(part.encode() if isinstance(part, str) else part for part in parts))
        limit = seconds if seconds < INFINITE else None
        try:
            stream = self._idle.pop() if self._idle else self._connect(limit)
            try:
                stream.settimeout(limit)
                stream.sendall(LENGTH.pack(len(request)) + request)
                poll = select.poll()
                poll.register(stream, select.POLLIN)
                # in pieces: poll's own limit is 24 days
                if not wait_awake(lambda left: bool(poll.poll(1e3 * min(left, LONGEST_POLL_SECONDS))), seconds):
                    raise TimeoutError
                answer = receive_exactly(stream, LENGTH.unpack(receive_exactly(stream, LENGTH.size))[0])
            except BaseException:
                stream.close()  # a late answer must not be taken for that of another request
                raise
        except OSError as error:
            if limit is not None and isinstance(error, TimeoutError):
                raise NoAnswerError(f"a request was not answered within {seconds:.1f} s") from None
            raise RuntimeError(f"the store at {self.address}:{self.port} has ended ({error})") from error
        self._idle.append(stream)
        return answer

    def close(self) -> None:
        """Close all connections, so that the store sees that this rank has left. Send no request afterwards."""
        while self._idle:
            self._idle.pop().close()
        if self._presence:
            self._presence.close()

    def _connect(self, limit: float | None) -> socket.socket:
        stream = close_after_fork(socket.create_connection((self.address, self.port), timeout=limit))
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            authenticate(stream, self.secret, STORE_NAME, rank=self._rank)
        except BaseException:
            stream.close()
            raise
        return stream


_kept_for_torch: list[Store] = []
"""Stores handed to torch's C++ code, which does not keep Python objects alive."""


class JobStore(Store):
    """A torch Store whose keys have a prefix. torch's process groups accept it.

    Its methods are those of BoundedStore and of torch's Store; reads wait for their keys.
    seconds: limit of waits for keys and, unless is_for_torch, of each request, as in BoundedStore.
    Raises: NoAnswerError; RuntimeError if the store has ended.
    """

    can_wait = True
    """Each thread's request has its own connection, so a wait in the store blocks no other request."""

    def __init__(
        self,
        connections: StoreConnections,
        prefix: str = "",
        *,
        seconds: float,
        deadline: float = INFINITE,
        is_for_torch: bool = False,
        numbers: Sequence[int] | None = None,
    ) -> None:
        """deadline: end of all requests, by awake_seconds(). numbers: for each rank, the number under which it has
        connected; tail() reports only these ranks. None: tail() reports the numbers of all clients."""
        super().__init__()
        self.connections, self.prefix, self.seconds = connections, prefix, seconds
        self._deadline, self._is_for_torch = deadline, is_for_torch
        self.numbers = numbers

    @property
    def torch_store(self) -> "JobStore":
        """Return a store for torch's process groups, whose waits have their own limits.

        It is in Python, although NCCL's threads call it. torch's stores in C++ do not suit: TCPStore listens without
        authentication, FileStore needs a shared disk, and the others do not see other ranks.
        """
        made = JobStore(self.connections, self.prefix, seconds=self.seconds, is_for_torch=True)
        _kept_for_torch.append(made)
        return made

    def within(self, seconds: float) -> "JobStore":
        deadline = min(self._deadline, awake_seconds() + seconds)
        return JobStore(self.connections, self.prefix, seconds=self.seconds, deadline=deadline, numbers=self.numbers)

    def set(self, key: str, value: Text) -> None:
        self._ask("set", self._name(key), value)

    def multi_set(self, keys: Sequence[str], values: Sequence[Text]) -> None:
        pairs = zip(map(self._name, keys), values, strict=True)
        self._ask("set", *(part for pair in pairs for part in pair))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        names = [self._name(key) for key in keys]
        while (answer := self._ask("get", *names))[:1] != DONE:
            self.wait(keys)
        return split(answer[1:])

    def check(self, keys: Sequence[str]) -> bool:
        return self._ask("check", *map(self._name, keys)) == DONE

    def add(self, key: str, count: int) -> int:
        return int(split(self._ask("add", self._name(key), str(count))[1:])[0])

    def append(self, key: str, value: Text) -> None:
        self._ask("append", self._name(key), value)

    def compare_set(self, key: str, expected: Text, desired: Text) -> bytes:
        """Write desired if the present value is the expected one; return the value afterwards."""
        return split(self._ask("compare_set", self._name(key), expected, desired)[1:])[0]

    def missing(self, keys: Sequence[str]) -> list[str]:
        """Return the keys that do not exist."""
        names = dict(zip(map(self._name, keys), keys, strict=True))
        return [names[name.decode()] for name in split(self._ask("missing", *names)[1:])]

    def delete_key(self, *keys: str) -> bool:
        """Delete keys; return whether all existed."""
        return self._ask("delete", *map(self._name, keys)) == DONE

    def tail(self, key: str, begin: int, *, num_gone: int = 0, seconds: float = 0.0) -> News:
        """Return a key's value from byte `begin` on, and the ranks whose processes have ended.

        A process has ended if it was connected and has no connection left. Waits up to seconds for new bytes, or until
        the number of such processes differs from num_gone.
        """
        answer = self._ask("tail", str(seconds), self._name(key), str(begin), str(num_gone), waits=seconds)
        value, *gone = split(answer[1:])
        numbers = frozenset(map(int, gone))
        if self.numbers is not None:
            return News(value, frozenset(rank for rank, each in enumerate(self.numbers) if each in numbers), len(gone))
        return News(value, numbers, len(gone))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys. Raises: RuntimeError after the time limit, with "timed out" as in torch's message."""
        seconds = self.seconds if timeout is None else timeout.total_seconds()
        if not self.wait_for(*keys, seconds=seconds):
            raise RuntimeError(f"wait for {', '.join(keys)} timed out after {seconds:g} s")

    def wait_for(self, *keys: str, seconds: float) -> bool:
        """Wait up to seconds for keys; return whether all exist."""
        return self._ask("wait", str(seconds), *map(self._name, keys), waits=seconds) == DONE

    def has_extended_api(self) -> bool:
        """Tell torch that append(), multi_get() and multi_set() are supported."""
        return True

    def clone(self) -> "JobStore":
        """Return a store for another thread: this one is thread-safe."""
        return self

    deleteKey = delete_key  # the name that torch's C++ code calls

    def _ask(self, name: str, *parts: Text, waits: float = 0.0) -> bytes:
        limit = INFINITE if self._is_for_torch else self.seconds + waits
        # a socket's timeout of 0 would mean non-blocking
        return self.connections.ask(name, *parts, seconds=min(limit, max(0.001, self._deadline - awake_seconds())))

    def _name(self, key: str) -> str:
        return f"{self.prefix}/{key}" if self.prefix else key


KeyValue = JobStore | BoundedStore
"""A store that answers each request within a time limit. Raises: NoAnswerError, RuntimeError."""


def start_store(
    listener: socket.socket, secret: bytes, *, world_size: int, timeout_seconds: float, rank: int = 0
) -> StoreConnections:
    """Start the store's process on a listening socket, for world_size ranks; return this rank's connections to it.

    Closes the socket in this process. The store's process ends with this one, or when the returned object is
    deleted. It may take START_SECONDS to start on a busy machine, even if timeout_seconds is shorter.
    Raises: OSError, also if it ends at once; RuntimeError.
    """
    address, port = listener.getsockname()[:2]
    root, facts = Path(bigbatch.__file__).parents[1], (listener.fileno(), os.getpid(), world_size)
    with listener:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _PROGRAM, str(root), *map(str, facts)],
            pass_fds=[listener.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
    assert process.stdin is not None
    process.stdin.write(secret.hex().encode() + b"\n")
    process.stdin.flush()
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)
    try:
        connections = StoreConnections(
            *(own, port, secret),
            rank=rank,
            timeout_seconds=max(timeout_seconds, START_SECONDS),
            has_ended=lambda: process.poll() is not None,
        )
    except BaseException:
        _end(process)
        raise
    weakref.finalize(connections, _end, process)
    return connections


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:  # it is stopped (SIGSTOP) or hangs
        process.kill()
        process.wait()
