"""The job's key-value store as its ranks ask it: torch's interface, over connections that prove the job's secret."""

import os
import select
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

from torch._C._distributed_c10d import Store

import bigbatch
from bigbatch.awake import awake_seconds, wait_awake
from bigbatch.comm.rendezvous.bounded_store import BoundedStore, NoAnswerError
from bigbatch.comm.rendezvous.secret import TurnedAwayError, call, end_with_process, receive_exactly
from bigbatch.comm.rendezvous.store_process import DONE, LENGTH, NAME, pack, split

AGAIN_SECONDS = 0.1
"""Between two attempts to reach a holder that does not listen yet, or has turned this rank away in a crowd."""
MOST_REFUSALS = 3
LONGEST_POLL_SECONDS = 3600.0
START_SECONDS = 60.0
END_SECONDS = 5.0
_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop(1)); from bigbatch.comm.rendezvous.store_process import main; main()"
)

INFINITE = float("inf")

Text = str | bytes


class Line:
    """Leads to the process that holds a store; any number of threads may ask at once, each by a connection of its own.

    The holder may come late, by timeout_seconds. Raises: OSError, or RuntimeError where it does not know the secret.
    """

    def __init__(self, address: str, port: int, secret: bytes, *, rank: int, timeout_seconds: float) -> None:
        self.address, self.port = address, port
        self._secret, self._rank = secret, rank
        deadline = awake_seconds() + timeout_seconds
        self._idle: list[socket.socket] = []
        self._presence: socket.socket | None = None
        """Over which nothing is asked: requests that are given up end theirs, this one only the process."""
        num_refusals = 0
        while not self._idle:
            try:
                left = max(AGAIN_SECONDS, deadline - awake_seconds())
                self._presence = self._presence or self._connect(left)
                self._idle.append(self._connect(left))
            except (OSError, TurnedAwayError) as error:
                num_refusals += isinstance(error, TurnedAwayError)
                if num_refusals == MOST_REFUSALS or awake_seconds() + AGAIN_SECONDS > deadline:
                    raise
                time.sleep(AGAIN_SECONDS)

    def ask(self, name: str, *parts: Text, seconds: float = INFINITE) -> bytes:
        """Return the answer to a request.

        Raises: NoAnswerError if none has come after so many seconds, RuntimeError if the holder is gone.
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
                stream.close()  # the answer may still come, and belongs to no other request
                raise
        except OSError as error:
            if limit is not None and isinstance(error, TimeoutError):
                raise NoAnswerError(f"a request was not answered within {seconds:.1f} s") from None
            raise RuntimeError(f"the store at {self.address}:{self.port} has ended ({error})") from error
        self._idle.append(stream)
        return answer

    def _connect(self, limit: float | None) -> socket.socket:
        stream = end_with_process(socket.create_connection((self.address, self.port), timeout=limit))
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            call(stream, self._secret, NAME, rank=self._rank)
        except BaseException:
            stream.close()
            raise
        return stream


_of_torch: list[Store] = []
"""What torch's C++ holds on to, which keeps no object of Python's alive."""


class JobStore(Store):
    """Reads and writes keys that begin with a prefix, as torch's own stores do; torch's process groups take it as well.

    Its methods are those of BoundedStore and of torch's Store; reads wait for their keys.
    seconds bounds waits for keys and, unless it is for torch, each request, as in BoundedStore.
    Raises: NoAnswerError; RuntimeError if the holder is gone.
    """

    def __init__(
        self, line: Line, prefix: str = "", *, seconds: float, deadline: float = INFINITE, is_for_torch: bool = False
    ) -> None:
        """deadline: when all requests are over; awake_seconds()."""
        super().__init__()
        self.line, self._prefix, self._seconds = line, prefix, seconds
        self._deadline, self._is_for_torch = deadline, is_for_torch

    @property
    def torch_store(self) -> "JobStore":
        """Return what torch's own process groups ask, whose waits have limits of their own."""
        made = JobStore(self.line, self._prefix, seconds=self._seconds, is_for_torch=True)
        _of_torch.append(made)
        return made

    def within(self, seconds: float) -> "JobStore":
        deadline = min(self._deadline, awake_seconds() + seconds)
        return JobStore(self.line, self._prefix, seconds=self._seconds, deadline=deadline)

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
        """Write where the present value is the expected one; return what is there then."""
        return split(self._ask("compare_set", self._name(key), expected, desired)[1:])[0]

    def delete_key(self, key: str) -> bool:
        """Forget a key; tell whether it was there."""
        return self._ask("delete", self._name(key)) == DONE

    def num_keys(self) -> int:
        return int(split(self._ask("count")[1:])[0])

    def gone(self) -> frozenset[int]:
        """Name the ranks that were here and whose every connection has ended: their processes have."""
        return frozenset(map(int, split(self._ask("gone")[1:])))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys. Raises: RuntimeError after the time limit, which says so in torch's words."""
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        if not self._wait(keys, seconds):
            raise RuntimeError(f"wait for {', '.join(keys)} timed out after {seconds:g} s")

    def wait_for(self, key: str, seconds: float) -> bool:
        return self._wait([key], seconds)

    def _wait(self, keys: Sequence[str], seconds: float) -> bool:
        return self._ask("wait", str(seconds), *map(self._name, keys), waits=seconds) == DONE

    def has_extended_api(self) -> bool:
        """Tell torch that append() and those of several keys are there."""
        return True

    def clone(self) -> "JobStore":
        """Return what another thread may use: this one."""
        return self

    # what torch's C++ calls them
    deleteKey, getNumKeys = delete_key, num_keys

    def _ask(self, name: str, *parts: Text, waits: float = 0.0) -> bytes:
        limit = INFINITE if self._is_for_torch else self._seconds + waits
        # a socket takes 0 for not waiting at all
        return self.line.ask(name, *parts, seconds=min(limit, max(0.001, self._deadline - awake_seconds())))

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key


KeyValue = JobStore | BoundedStore
"""Answers requests, each within a limit. Raises: NoAnswerError, RuntimeError."""


def hold_store(listener: socket.socket, secret: bytes, *, world_size: int, timeout_seconds: float) -> Line:
    """Start the process that holds a store for so many ranks behind a socket that listens; return the line to it.

    The socket is closed here. The process ends with this one, or once nothing here has the line any more. The limit is
    for others to come: the process itself may take START_SECONDS to begin, as on a busy machine.
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
        line = Line(own, port, secret, rank=0, timeout_seconds=max(timeout_seconds, START_SECONDS))
    except BaseException:
        _end(process)
        raise
    weakref.finalize(line, _end, process)
    return line


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:  # it was stopped, or hangs
        process.kill()
        process.wait()
