"""What a job's processes know and nobody else does: who connects proves it, on both ends, and never says it.

The secret comes with the job, by its launcher's environment or by MPI. A proof is an HMAC over what both ends have
drawn anew, so that one that was overheard is of no use, and over who proves, so that none can be sent back.
"""

import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from weakref import WeakSet

SECRET_BYTES = 32
NONCE_BYTES = 16
PROOF_BYTES = 32
_HELLO = struct.Struct(f"!4sI{NONCE_BYTES}s{PROOF_BYTES}s")
"""What a caller says: which protocol, its rank, what it has drawn, and its proof."""
_PROTOCOL = b"bb01"

HELLO_BYTES = _HELLO.size
SHORTAGE_SECONDS = 0.01
"""Between two looks at callers while none can be let in."""

_STREAMS: "WeakSet[socket.socket]" = WeakSet()
"""Connections that end with this process, whatever it has forked."""


def end_with_process(stream: socket.socket) -> socket.socket:
    """Return the connection, which no process that is forked later keeps open.

    Loaders fork workers, and these outlive a rank that is killed: the other end would take it for alive.
    """
    _STREAMS.add(stream)
    return stream


os.register_at_fork(after_in_child=lambda: list(map(socket.socket.close, list(_STREAMS))))


class StrangerError(RuntimeError):
    """The other end of a connection does not know the job's secret."""


class TurnedAwayError(StrangerError):
    """The other end does not take this one for a part of the job, or there is a crowd at its door."""


def new_secret() -> str:
    """Draw a secret, in hexadecimal digits."""
    return secrets.token_hex(SECRET_BYTES)


def let_in(listener: socket.socket, make_room: Callable[[], None]) -> socket.socket | None:
    """Return the stream of who calls, which no longer blocks; None for one that has left already.

    None, too, where this process has no descriptors left: make_room is to give one back, and the caller is heard again.
    """
    try:
        stream, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    except OSError:
        make_room()
        time.sleep(SHORTAGE_SECONDS)  # the caller stands there still, and would be heard at once
        return None
    stream.setblocking(False)
    return stream


class Door:
    """Lets in who knows the secret. name: of this listener, such as "store", which no other one has in this job."""

    def __init__(self, secret: bytes, name: str) -> None:
        self._secret, self._name = secret, name
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        """What callers must know beforehand, drawn for this listener."""

    def judge(self, hello: bytes) -> tuple[int, bytes]:
        """Return the caller's rank, and what to answer it. Raises: StrangerError."""
        protocol, rank, drawn, proof = _HELLO.unpack(hello)
        expected = _prove(self._secret, b"caller", self._name, rank, drawn, self.nonce)
        # takes equally long wherever they differ, so that time tells a guesser nothing
        if protocol != _PROTOCOL or not hmac.compare_digest(proof, expected):
            raise StrangerError("a caller does not know this job's secret")
        return rank, _prove(self._secret, b"door", self._name, rank, drawn, self.nonce)


def introduce(secret: bytes, name: str, nonce: bytes, *, rank: int) -> tuple[bytes, bytes]:
    """Return what to say first at the Door of that name and nonce, and what it answers where it is the job's own."""
    drawn = secrets.token_bytes(NONCE_BYTES)
    proof = _prove(secret, b"caller", name, rank, drawn, nonce)
    return _HELLO.pack(_PROTOCOL, rank, drawn, proof), _prove(secret, b"door", name, rank, drawn, nonce)


def call(stream: socket.socket, secret: bytes, name: str, *, rank: int) -> None:
    """Be let in at a door that says its nonce first. Raises: OSError; TurnedAwayError; StrangerError."""
    hello, expected = introduce(secret, name, receive_exactly(stream, NONCE_BYTES), rank=rank)
    try:
        stream.sendall(hello)
        answer = receive_exactly(stream, PROOF_BYTES)
    except ConnectionError:  # a door says nothing to strangers
        raise TurnedAwayError("it does not take this process for one of the job: they know different secrets") from None
    if not hmac.compare_digest(answer, expected):
        raise StrangerError("it does not know the job's secret")


def receive_exactly(stream: socket.socket, count: int) -> bytes:
    """Read so many bytes. Raises: ConnectionError where the other end closes before."""
    data = bytearray()
    while len(data) < count:
        if not (more := stream.recv(count - len(data))):
            raise ConnectionResetError("the other end closed the connection")
        data += more
    return bytes(data)


def _prove(secret: bytes, who: bytes, name: str, rank: int, drawn: bytes, nonce: bytes) -> bytes:
    text = b"\0".join((_PROTOCOL, who, name.encode(), str(rank).encode(), drawn + nonce))
    return hmac.digest(secret, text, "sha256")
