"""Server process of the job's key-value store: runs on rank 0's host, and serves only clients that know the secret.

Imports only the standard library. Ends with rank 0: it watches its pipe and its parent process. Clients' data is kept
as bytes and never interpreted.
"""

import os
import resource
import selectors
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress

from bigbatch.awake import awake_seconds
from bigbatch.comm.rendezvous import limits
from bigbatch.comm.rendezvous.secret import HELLO_BYTES, AuthenticationError, ServerHandshake, accept_client

LENGTH = struct.Struct("!I")
"""Length in bytes, before each request, answer and part."""
MAX_REQUEST_BYTES = 64 << 20
"""Largest request; a larger one ends its connection."""
HELLO_SECONDS = 10.0
"""Time limit of a client's authentication."""
MAX_UNAUTHENTICATED = 256
"""Unauthenticated connections beyond the job's ranks; the server drops the oldest one if there are more."""
STORE_NAME = "store"
DONE, MISSING = b"\0", b"\1"


def pack(*parts: bytes) -> bytes:
    """Join the parts of a request or an answer; split() is the inverse."""
    return b"".join(LENGTH.pack(len(part)) + part for part in parts)


def split(data: bytes) -> list[bytes]:
    """Return the parts that pack() joined. Raises: ValueError if the data is malformed."""
    parts, at = [], 0
    while at < len(data):
        start = at + LENGTH.size
        if start > len(data) or start + (length := LENGTH.unpack_from(data, at)[0]) > len(data):
            raise ValueError("a request is cut off")
        parts.append(data[start : start + length])
        at = start + length
    return parts


class _Client:
    """One connection, unauthenticated until its hello has come."""

    def __init__(self, stream: socket.socket, handshake: ServerHandshake) -> None:
        self.stream = stream
        self.handshake: ServerHandshake | None = handshake
        self.since = awake_seconds()
        self.rank: int | None = None
        """The client's rank; None before authentication."""
        self.incoming, self.outgoing = bytearray(), bytearray(handshake.nonce)
        self.waits_for: set[bytes] = set()
        """Missing keys of its pending wait."""
        self.tail: tuple[bytes, int, int] | None = None
        """Key, first byte and number of gone ranks of its pending request for news."""
        self.waits_until = float("inf")
        """When its wait ends without an answer, to within STORE_LOOK_SECONDS; awake_seconds()."""

    def requests(self) -> Iterator[list[bytes]]:
        """Yield the complete requests. Raises: ValueError, AuthenticationError."""
        if self.handshake is not None and len(self.incoming) >= HELLO_BYTES:
            self.rank, answer = self.handshake.verify(bytes(self.incoming[:HELLO_BYTES]))
            self.outgoing += answer
            self.handshake = None
            del self.incoming[:HELLO_BYTES]
        while self.handshake is None and len(self.incoming) >= LENGTH.size:
            length = LENGTH.unpack_from(self.incoming)[0]
            if length > MAX_REQUEST_BYTES:
                raise ValueError(f"a request of {length} bytes")
            if len(self.incoming) < LENGTH.size + length:
                return
            request = bytes(self.incoming[LENGTH.size : LENGTH.size + length])
            del self.incoming[: LENGTH.size + length]
            yield split(request)


class KeyValueTable:
    """The key-value table, and the requests on it: name of an operation, then its arguments."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}

    def answer(self, request: list[bytes]) -> bytes:
        """Execute a request; return the answer. Raises: LookupError or ValueError for a malformed one."""
        values = self.values
        match request:
            case [b"set", *pairs]:
                for key, value in zip(pairs[::2], pairs[1::2], strict=True):
                    values[key] = value
                return DONE
            case [b"get", *keys]:
                if not all(key in values for key in keys):
                    return MISSING
                return DONE + pack(*(values[key] for key in keys))
            case [b"check", *keys]:
                return DONE if all(key in values for key in keys) else MISSING
            case [b"add", key, count]:
                values[key] = str(int(values.get(key, b"0")) + int(count)).encode()
                return DONE + pack(values[key])
            case [b"append", key, value]:
                values[key] = values.get(key, b"") + value
                return DONE
            case [b"compare_set", key, expected, desired]:
                # like torch's stores: an empty expected value matches a missing key, and a missing key returns expected
                if values.get(key, b"") == expected:
                    values[key] = desired
                return DONE + pack(values.get(key, expected))
            case [b"missing", *keys]:
                return DONE + pack(*(key for key in keys if key not in values))
            case [b"delete", *keys]:
                return MISSING if None in [values.pop(key, None) for key in keys] else DONE
        raise LookupError("no such operation")


class StoreServer:
    """Serves the table to any number of clients from one thread.

    A wait is answered when all its keys exist, or after the seconds that it states.
    """

    def __init__(self, listener: socket.socket, secret: bytes, *, world_size: int) -> None:
        """world_size: ranks that may connect at once."""
        listener.setblocking(False)
        self._listener, self._secret = listener, secret
        self._max_unauthenticated = MAX_UNAUTHENTICATED + world_size
        self._table = KeyValueTable()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._unauthenticated: deque[_Client] = deque()
        self._waiting: dict[bytes, list[_Client]] = {}
        self._news_waiters: dict[bytes, set[_Client]] = {}
        """Key -> clients that wait for news of it."""
        self._connections_of: dict[int, set[_Client]] = {}
        """Connections of each rank that has authenticated."""
        self._gone_since: dict[int, float] = {}
        """Rank -> when its last connection ended; awake_seconds()."""

    def serve(self, is_over: Callable[[], bool], *, wake_fd: int | None = None) -> None:
        """Serve until is_over(), called every STORE_LOOK_SECONDS and when the descriptor `wake_fd` is readable."""
        if wake_fd is not None:
            self._selector.register(wake_fd, selectors.EVENT_READ)
        last_look = awake_seconds()
        while True:
            is_woken = False
            for key, events in self._selector.select(limits.STORE_LOOK_SECONDS):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.data is None:
                    is_woken = True
                else:
                    self._serve(key.data, events)
            now = awake_seconds()
            if is_woken or now - last_look > limits.STORE_LOOK_SECONDS:
                last_look = now
                while self._unauthenticated and now - self._unauthenticated[0].since > HELLO_SECONDS:
                    self._drop_oldest_unauthenticated()
                late = {each for clients in self._waiting.values() for each in clients if now > each.waits_until}
                for client in late:
                    self._cancel_wait(client)
                    self._end_wait(client, MISSING)
                for client in [each for clients in self._news_waiters.values() for each in clients]:
                    self._answer_tail(client, is_late=now > client.waits_until)
                if is_over():
                    return

    def _accept(self) -> None:
        stream = accept_client(self._listener, self._drop_oldest_unauthenticated)
        if stream is None:
            return
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client = _Client(stream, ServerHandshake(self._secret, STORE_NAME))
        self._unauthenticated.append(client)
        self._selector.register(stream, selectors.EVENT_READ | selectors.EVENT_WRITE, client)
        if len(self._unauthenticated) > self._max_unauthenticated:
            self._drop_oldest_unauthenticated()

    def _drop_oldest_unauthenticated(self) -> None:
        if self._unauthenticated:
            self._close(self._unauthenticated[0])

    def _serve(self, client: _Client, events: int) -> None:
        if client.stream.fileno() < 0:  # dropped in this round
            return
        try:
            if events & selectors.EVENT_READ:
                self._receive(client)
            self._send(client)
        except BlockingIOError:
            pass
        except (OSError, AuthenticationError, ValueError, LookupError):
            self._close(client)

    def _receive(self, client: _Client) -> None:
        data = client.stream.recv(1 << 16)
        if not data:
            raise ConnectionResetError
        client.incoming += data
        was_unauthenticated = client.handshake is not None
        for request in client.requests():
            self._answer(client, request)
        if was_unauthenticated and client.rank is not None:
            self._unauthenticated.remove(client)
            self._connections_of.setdefault(client.rank, set()).add(client)
            self._gone_since.pop(client.rank, None)

    def _answer(self, client: _Client, request: list[bytes]) -> None:
        self._cancel_wait(client)
        if request[0] == b"wait":
            client.waits_for = {key for key in request[2:] if key not in self._table.values}
            client.waits_until = awake_seconds() + float(request[1])
            for key in client.waits_for:
                self._waiting.setdefault(key, []).append(client)
            if not client.waits_for:
                _reply(client, DONE)
            return
        if request[0] == b"tail":
            _, seconds, key, begin, num_gone = request
            client.tail, client.waits_until = (key, int(begin), int(num_gone)), awake_seconds() + float(seconds)
            self._news_waiters.setdefault(key, set()).add(client)
            self._answer_tail(client, is_late=not float(seconds))
            return
        _reply(client, self._table.answer(request))
        for key in request[1::2]:  # the odd parts are keys
            for waiting in tuple(self._news_waiters.get(key, ())):
                self._answer_tail(waiting, is_late=request[0] == b"append")
            if key in self._waiting and key in self._table.values:
                for waiting in self._waiting.pop(key):
                    waiting.waits_for.remove(key)
                    if not waiting.waits_for:
                        self._end_wait(waiting, DONE)

    def _answer_tail(self, client: _Client, *, is_late: bool = False) -> None:
        """Answer a request for news if there are any, or if it is late."""
        assert client.tail is not None
        key, begin, num_gone = client.tail
        value, gone_before = self._table.values.get(key, b"")[begin:], awake_seconds() - limits.GONE_SECONDS
        gone = [rank for rank, since in self._gone_since.items() if since < gone_before]
        if value or len(gone) != num_gone or is_late:
            self._cancel_wait(client)
            self._end_wait(client, DONE + pack(value, *(str(rank).encode() for rank in gone)))

    def _end_wait(self, client: _Client, answer: bytes) -> None:
        _reply(client, answer)
        with suppress(OSError):  # the selector reports a closed connection
            self._send(client)

    def _cancel_wait(self, client: _Client) -> None:
        """Cancel its pending wait, or request for news."""
        if client.tail is not None:
            self._news_waiters[client.tail[0]].discard(client)
            client.tail = None
        for key in client.waits_for:
            self._waiting[key].remove(client)
            if not self._waiting[key]:
                del self._waiting[key]
        client.waits_for = set()

    def _send(self, client: _Client) -> None:
        if client.outgoing:
            with suppress(BlockingIOError):
                del client.outgoing[: client.stream.send(client.outgoing)]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if client.outgoing else 0)
        self._selector.modify(client.stream, wanted, client)

    def _close(self, client: _Client) -> None:
        if client in self._unauthenticated:
            self._unauthenticated.remove(client)
        if client.rank is not None and client in (connections := self._connections_of.get(client.rank, set())):
            connections.remove(client)
            if not connections:
                self._gone_since[client.rank] = awake_seconds()
        self._cancel_wait(client)
        self._selector.unregister(client.stream)
        client.stream.close()


def _reply(client: _Client, answer: bytes) -> None:
    client.outgoing += LENGTH.pack(len(answer)) + answer


def main() -> None:
    """Serve a listening socket, given by its descriptor. Read the secret from standard input; end when it closes."""
    # this process ends after rank 0, so it ignores signals that are meant for rank 0, and has its own process group; in
    # the same session, since the kernel then continues a stopped group whose parent has ended
    os.setpgid(0, 0)
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        signal.signal(each, signal.SIG_IGN)
    descriptor, parent, world_size = map(int, sys.argv[1:])
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    secret = bytes.fromhex(sys.stdin.buffer.readline().decode().strip())
    server = StoreServer(socket.socket(fileno=descriptor), secret, world_size=world_size)
    end = sys.stdin.fileno()
    os.set_blocking(end, False)

    def is_over() -> bool:
        if os.getppid() != parent:
            return True
        try:
            return os.read(end, 1) == b""
        except BlockingIOError:
            return False

    server.serve(is_over, wake_fd=end)
