"""Mutual authentication of a job's processes by a shared secret that is never sent.

The launcher's environment or MPI distributes the secret. A proof is an HMAC over nonces of both ends, so a recorded
proof is useless, and over the role of its sender, so it cannot be sent back.
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
"""A client's hello: protocol, rank, nonce and proof."""
_PROTOCOL = b"bb01"

HELLO_BYTES = _HELLO.size
ACCEPT_RETRY_SECONDS = 0.01
"""Pause after a failed accept, such as without free descriptors."""

_STREAMS: "WeakSet[socket.socket]" = WeakSet()
"""Connections that forked children close."""


def close_after_fork(stream: socket.socket) -> socket.socket:
    """Register a connection for closing in processes forked later; return it.

    Otherwise a loader's workers, which outlive a killed rank, would keep it open, and the rank would seem alive.
    """
    _STREAMS.add(stream)
    return stream


os.register_at_fork(after_in_child=lambda: list(map(socket.socket.close, list(_STREAMS))))


class AuthenticationError(RuntimeError):
    """The other end of a connection does not know the job's secret."""


class RejectedError(AuthenticationError):
    """The other end refused this process: another secret, or too many connections at once."""


def new_secret() -> str:
    """Return a new random secret in hexadecimal digits."""
    return secrets.token_hex(SECRET_BYTES)


def accept_client(listener: socket.socket, make_room: Callable[[], None]) -> socket.socket | None:
    """Accept a connection, set non-blocking; None if the client has closed it already.

    Also None if this process has no free descriptors: make_room frees one, and the client is accepted later.
    """
    try:
        stream, _ = listener.accept()
    except (BlockingIOError, ConnectionAbortedError):
        return None
    except OSError:
        make_room()
        time.sleep(ACCEPT_RETRY_SECONDS)  # the connection is still pending: do not spin
        return None
    stream.setblocking(False)
    return stream


class ServerHandshake:
    """Server side of the authentication. name: of this listener, such as "store"; unique in the job."""

    def __init__(self, secret: bytes, name: str) -> None:
        self._secret, self._name = secret, name
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        """Nonce of this listener, which clients receive first."""

    def verify(self, hello: bytes) -> tuple[int, bytes]:
        """Return the client's rank and the answer. Raises: AuthenticationError if the proof is wrong."""
        protocol, rank, client_nonce, proof = _HELLO.unpack(hello)
        expected = _prove(self._secret, b"caller", self._name, rank, client_nonce, self.nonce)
        # in constant time, so that timing reveals nothing
        if protocol != _PROTOCOL or not hmac.compare_digest(proof, expected):
            raise AuthenticationError("a client does not know this job's secret")
        return rank, _prove(self._secret, b"door", self._name, rank, client_nonce, self.nonce)


def make_hello(secret: bytes, name: str, nonce: bytes, *, rank: int) -> tuple[bytes, bytes]:
    """Return the hello for the server of that name and nonce, and the answer that proves it belongs to the job."""
    client_nonce = secrets.token_bytes(NONCE_BYTES)
    proof = _prove(secret, b"caller", name, rank, client_nonce, nonce)
    return _HELLO.pack(_PROTOCOL, rank, client_nonce, proof), _prove(secret, b"door", name, rank, client_nonce, nonce)


def authenticate(stream: socket.socket, secret: bytes, name: str, *, rank: int) -> None:
    """Authenticate with a server that sends its nonce first. Raises: OSError, RejectedError, AuthenticationError."""
    hello, expected = make_hello(secret, name, receive_exactly(stream, NONCE_BYTES), rank=rank)
    try:
        stream.sendall(hello)
        answer = receive_exactly(stream, PROOF_BYTES)
    except ConnectionError:  # a server closes unauthenticated connections without an answer
        raise RejectedError("it refused this process: they know different secrets") from None
    if not hmac.compare_digest(answer, expected):
        raise AuthenticationError("it does not know the job's secret")


def receive_exactly(stream: socket.socket, count: int) -> bytes:
    """Read count bytes. Raises: ConnectionError if the other end closes before."""
    data = bytearray()
    while len(data) < count:
        if not (more := stream.recv(count - len(data))):
            raise ConnectionResetError("the other end closed the connection")
        data += more
    return bytes(data)


def _prove(secret: bytes, role: bytes, name: str, rank: int, client_nonce: bytes, nonce: bytes) -> bytes:
    text = b"\0".join((_PROTOCOL, role, name.encode(), str(rank).encode(), client_nonce + nonce))
    return hmac.digest(secret, text, "sha256")
