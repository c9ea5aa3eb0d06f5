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
from bigbatch.comm.rendezvous.bounded_store import NoAnswerError
from bigbatch.comm.rendezvous.forks import end_with_process
from bigbatch.comm.rendezvous.secret import TurnedAwayError, call, receive_exactly
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

Text = str | bytes


class Line:
    """Leads to the process that holds a store; any number of threads may ask at once, each by a connection of its own.

    The holder may come late, by timeout. Raises: OSError, or RuntimeError where it does not know the secret.
    """

    def __init__(self, address: str, port: int, secret: bytes, *, rank: int, timeout: timedelta) -> None:
        self.address, self.port = address, port
        self._secret, self._rank = secret, rank
        deadline = awake_seconds() + timeout.total_seconds()
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

    def ask(self, name: str, *parts: Text, seconds: float | None = None) -> bytes:
        """Return the answer to a request.

        Raises: NoAnswerError where none has come after so many seconds, RuntimeError where the holder is gone.
        """
        request = pack(name.encode(), *(part.encode() if isinstance(part, str) else part for part in parts))
        try:
            stream = self._idle.pop() if self._idle else self._connect(seconds)
            try:
                stream.settimeout(seconds)
                stream.sendall(LENGTH.pack(len(request)) + request)
                if seconds is not None and not _is_answered(stream, seconds):
                    raise TimeoutError
                answer = receive_exactly(stream, LENGTH.unpack(receive_exactly(stream, LENGTH.size))[0])
            except BaseException:
                stream.close()  # the answer may still come, and is nobody else's
                raise
        except OSError as error:
            if seconds is not None and isinstance(error, TimeoutError):
                raise NoAnswerError(f"a request was not answered within {seconds:.1f} s") from None
            raise RuntimeError(f"the store at {self.address}:{self.port} has ended ({error})") from error
        self._idle.append(stream)
        return answer

    def _connect(self, seconds: float | None) -> socket.socket:
        stream = end_with_process(socket.create_connection((self.address, self.port), timeout=seconds))
        try:
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            call(stream, self._secret, NAME, rank=self._rank)
        except BaseException:
            stream.close()
            raise
        return stream


def _is_answered(stream: socket.socket, seconds: float) -> bool:
    poll = select.poll()
    poll.register(stream, select.POLLIN)
    # in pieces: poll's own limit is 24 days
    return wait_awake(lambda left: bool(poll.poll(1e3 * min(left, LONGEST_POLL_SECONDS))), seconds)


_of_torch: list[Store] = []
"""What torch's C++ holds on to, which keeps no object of Python's alive."""


class JobStore(Store):
    """Reads and writes keys that begin with a prefix, as torch's own stores do; torch's process groups take it as well.

    timeout bounds waits for keys, and seconds, where they are stated, every request, as BoundedStore's.
    Raises: NoAnswerError; RuntimeError where the holder is gone.
    """

    def __init__(
        self,
        line: Line,
        prefix: str,
        *,
        timeout: timedelta,
        seconds: float | None = None,
        deadline: float = float("inf"),
    ) -> None:
        """deadline: when all requests are over; awake_seconds()."""
        super().__init__()
        self._line, self._prefix, self._timeout = line, prefix, timeout
        self._seconds, self._deadline = seconds, deadline

    @property
    def port(self) -> int:
        """Return where the holder listens."""
        return self._line.port

    @property
    def torch_store(self) -> "JobStore":
        """Return what torch's own process groups ask, whose waits may last for timeout."""
        made = JobStore(self._line, self._prefix, timeout=self._timeout)
        _of_torch.append(made)
        return made

    def under(self, prefix: str, *, seconds: float | None = None) -> "JobStore":
        """Return the part of the same store whose keys begin so, and what bounds its requests."""
        return JobStore(self._line, self._name(prefix), timeout=self._timeout, seconds=seconds)

    def within(self, seconds: float) -> "JobStore":
        """Return a view of the same store, whose requests are over in so many seconds, all of them together."""
        deadline = min(self._deadline, awake_seconds() + seconds)
        return JobStore(self._line, self._prefix, timeout=self._timeout, seconds=self._seconds, deadline=deadline)

    def set(self, key: str, value: Text) -> None:
        """Write a value."""
        self._ask("set", self._name(key), value)

    def multi_set(self, keys: Sequence[str], values: Sequence[Text]) -> None:
        """Write several."""
        pairs = zip(map(self._name, keys), values, strict=True)
        self._ask("set", *(part for pair in pairs for part in pair))

    def get(self, key: str) -> bytes:
        """Wait for a value and read it."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Wait for several values and read them."""
        names = [self._name(key) for key in keys]
        while (answer := self._ask("get", *names))[:1] != DONE:
            self.wait(keys)
        return split(answer[1:])

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all of these keys are there."""
        return self._ask("check", *map(self._name, keys)) == DONE

    def add(self, key: str, count: int) -> int:
        """Count in a key, from 0; return the sum."""
        return int(split(self._ask("add", self._name(key), str(count))[1:])[0])

    def append(self, key: str, value: Text) -> None:
        """Write behind the value of a key, from "" on."""
        self._ask("append", self._name(key), value)

    def compare_set(self, key: str, expected: Text, desired: Text) -> bytes:
        """Write where the present value is the expected one; return what is there then."""
        return split(self._ask("compare_set", self._name(key), expected, desired)[1:])[0]

    def delete_key(self, key: str) -> bool:
        """Forget a key; tell whether it was there."""
        return self._ask("delete", self._name(key)) == DONE

    def num_keys(self) -> int:
        """Count the keys of the whole store."""
        return int(split(self._ask("count")[1:])[0])

    def gone(self) -> frozenset[int]:
        """Name the ranks that were here and whose every connection has ended: their processes have."""
        return frozenset(map(int, split(self._ask("gone")[1:])))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys. Raises: RuntimeError after the time limit, which says so in torch's words."""
        seconds = (timeout or self._timeout).total_seconds()
        if not self._wait(keys, seconds):
            raise RuntimeError(f"wait for {', '.join(keys)} timed out after {seconds:g} s")

    def wait_for(self, key: str, seconds: float) -> bool:
        """Wait about so long for a key; tell whether it is there."""
        return self._wait([key], seconds)

    def _wait(self, keys: Sequence[str], seconds: float) -> bool:
        return self._ask("wait", str(seconds), *map(self._name, keys), waits=seconds) == DONE

    def set_timeout(self, timeout: timedelta) -> None:
        """Change the limit of waits."""
        self._timeout = timeout

    def has_extended_api(self) -> bool:
        """Tell torch that append() and those of several keys are there."""
        return True

    def clone(self) -> "JobStore":
        """Return what another thread may use: this one."""
        return self

    # what torch's C++ calls them
    deleteKey, getNumKeys = delete_key, num_keys

    def _ask(self, name: str, *parts: Text, waits: float = 0.0) -> bytes:
        limits = [self._seconds + waits] if self._seconds is not None else []
        if self._deadline < float("inf"):
            limits.append(max(0.001, self._deadline - awake_seconds()))  # 0 would mean without waiting at all
        return self._line.ask(name, *parts, seconds=min(limits, default=None))

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}" if self._prefix else key


def hold_store(listener: socket.socket, secret: bytes, *, world_size: int, timeout: timedelta) -> Line:
    """Start the process that holds a store for so many ranks behind a socket that listens; return the line to it.

    The socket is closed here. The process ends with this one, or once nobody here has the line any more. timeout is for
    others to come: a process of one's own may take START_SECONDS to begin, as on a busy machine.
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
    try:
        line = Line(_reached_at(address), port, secret, rank=0, timeout=max(timeout, timedelta(seconds=START_SECONDS)))
    except BaseException:
        _end(process)
        raise
    weakref.finalize(line, _end, process)
    return line


def _reached_at(address: str) -> str:
    """Return an own address for one that means all of them."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address, address)


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:  # it was stopped, or hangs
        process.kill()
        process.wait()
