"""Byte streams between ranks over TCP. The thread that waits moves all bytes: no other thread, no lock."""

import hmac
import select
import socket
import struct
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from bigbatch.awake import awake_seconds
from bigbatch.comm.backends.operation_tags import TAG, OperationTags
from bigbatch.comm.rendezvous.addresses import family_of, own_address
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.limits import POLL_SECONDS
from bigbatch.comm.rendezvous.secret import (
    HELLO_BYTES,
    AuthenticationError,
    ServerHandshake,
    accept_client,
    close_after_fork,
    make_hello,
)
from bigbatch.errors import CommError

HELLO_SECONDS = 10.0
"""Time limit for a connection to authenticate itself."""
MAX_UNAUTHENTICATED = 64
"""Most unauthenticated connections in addition to the job's own; the oldest is dropped first."""
UNPACED = ("cubic", "reno")
"""Congestion controls that do not pace, so that a burst fills a link at once; in order of preference."""
HEADER = struct.Struct("!Q" + TAG.format[1:])
"""Header of each message: its length in bytes, and the tag of the operation that sends it."""

WhileWaiting = Callable[[float], None]
"""(seconds waited so far): called every POLL_SECONDS of a wait; raises to give up."""


class Transfer:
    """One message on its way to or from a peer: its header, then its bytes."""

    __slots__ = ("done", "header", "left", "links", "tag")

    def __init__(self, data: memoryview, links: "Links", *, is_sent: bool) -> None:
        self.tag = links.tags.tag
        self.header = bytearray(HEADER.pack(len(data), *self.tag) if is_sent else HEADER.size)
        # header and data go to the kernel in one call, without a copy that joins them
        self.left = [memoryview(self.header), data]
        self.links = links
        self.done = False

    def advance(self, count: int) -> None:
        while self.left and count >= len(self.left[0]):
            count -= len(self.left.pop(0))
        if self.left:
            self.left[0] = self.left[0][count:]
        self.done = not self.left

    def wait(self) -> None:
        """Return when all bytes have arrived, or are in the kernel's buffers. Raises: OSError, CommError."""
        if not self.done:
            self.links.wait_for(self)


def avoid_bbr(stream: socket.socket) -> None:
    """Replace BBR as congestion control, if the system uses it by default and lets a user choose.

    Call it before connect or listen (accepted sockets inherit it): a connection that has used BBR stays paced. BBR
    sends at its last observed rate and drains the link to measure its delay; a ring's bursts and pauses mislead it. Any
    other control was chosen for this network, and stays (docs/decisions/019).
    """
    option = getattr(socket, "TCP_CONGESTION", None)  # Linux
    if option is None or not stream.getsockopt(socket.IPPROTO_TCP, option, 16).startswith(b"bbr"):
        return
    for name in UNPACED:
        with suppress(OSError):  # this kernel lacks it, or allows it to root only
            stream.setsockopt(socket.IPPROTO_TCP, option, name.encode())
            return


class Link:
    """The stream to one peer, and its messages to send and to receive, in order."""

    __slots__ = ("fd", "incoming", "outgoing", "peer", "polled", "proof", "socket")

    def __init__(self, peer: int, stream: socket.socket, *, proof: bytes = b"") -> None:
        """proof: bytes that the peer must send first, to show that it knows the job's secret."""
        stream.setblocking(False)
        # otherwise a short message would wait until the one before is acknowledged
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self.socket = stream
        self.fd = stream.fileno()
        self.outgoing: deque[Transfer] = deque()
        self.incoming: deque[Transfer] = deque()
        self.polled = 0
        self.proof = proof

    def send_ready(self) -> None:
        """Send what the kernel accepts without blocking."""
        while self.outgoing:
            transfer = self.outgoing[0]
            try:
                transfer.advance(self.socket.sendmsg(transfer.left))
            except BlockingIOError:
                return
            if not transfer.done:
                return
            self.outgoing.popleft()

    def receive_ready(self) -> None:
        """Receive the expected bytes that have arrived, without blocking.

        Raises: ConnectionError if the peer left; CommError if it does not know the job's secret, runs another
        operation, or sends a message of another length.
        """
        if self.proof and not self._check_proof():
            return
        while self.incoming:
            transfer = self.incoming[0]
            # two pieces are left while the header is incomplete
            is_first = len(transfer.left) == 2
            try:
                count = self.socket.recvmsg_into(transfer.left)[0]
            except BlockingIOError:
                return
            if count == 0:
                raise ConnectionResetError(f"rank {self.peer} closed the connection")
            expected = len(transfer.left[-1])
            transfer.advance(count)
            if is_first and len(transfer.left) < 2:  # checked once, as soon as the header is complete
                self._check_header(transfer, expected)
            if not transfer.done:
                return
            self.incoming.popleft()

    def _check_header(self, transfer: Transfer, expected: int) -> None:
        length, *tag = HEADER.unpack(transfer.header)
        if tuple(tag) != transfer.tag:
            raise transfer.links.tags.error(self.peer, tuple(tag))
        if length != expected:
            raise CommError(
                f"rank {self.peer} sent a message of {length} bytes where {expected} were expected: all ranks must "
                "sum the same tensors in the same order"
            )

    def _check_proof(self) -> bool:
        """Compare the bytes of the peer's proof so far; return whether it is complete."""
        try:
            hello_so_far = self.socket.recv(len(self.proof))
        except BlockingIOError:
            return False
        if not hello_so_far:
            raise ConnectionResetError(f"rank {self.peer} closed the connection")
        if not hmac.compare_digest(hello_so_far, self.proof[: len(hello_so_far)]):
            raise CommError(f"the process that answers for rank {self.peer} does not know this job's secret")
        self.proof = self.proof[len(hello_so_far) :]
        return not self.proof


class Links:
    """Streams from this rank to any others, made on first use: the higher rank connects, the lower one accepts.

    Both prove that they know the job's secret. Listens on one address only. All methods but shut_down() must run on one
    thread. while_waiting bounds each wait.
    """

    def __init__(self, env: ProcessEnv, control: JobControl, *, while_waiting: WhileWaiting) -> None:
        self._control = control
        self._rank, self._world_size = env.rank, env.world_size
        self.tags = OperationTags(env.rank)
        """The operation to which new messages belong; peers must send the same tag."""
        self._while_waiting = while_waiting
        self._links: dict[int, Link] = {}
        self._by_fd: dict[int, Link] = {}
        self._unauthenticated: dict[int, tuple[socket.socket, bytearray, float]] = {}
        """Connections by file descriptor, the oldest first: socket, hello so far, and when it was accepted."""
        self._max_unauthenticated = env.world_size + MAX_UNAUTHENTICATED
        self._poll = select.poll()
        self._is_shut = False
        self._last_transfer = self._last_check = 0.0
        """When bytes last moved over a link, and when while_waiting was last called; awake_seconds()."""
        towards = control.master[0] if control.master and not env.is_one_host else None
        address = own_address(is_one_host=env.is_one_host, interface=env.interface, towards=towards)
        # backlog: all higher ranks may connect before this one accepts
        self._listener = socket.create_server((address, 0), family=family_of(address), backlog=1024)
        avoid_bbr(self._listener)
        self._listener.setblocking(False)
        self._poll.register(self._listener, select.POLLIN)
        # port 0 above lets the system choose one, known only now
        where = self._listener.getsockname()
        self._handshake = ServerHandshake(control.secret, _name(env.rank))
        with control.detector.explained("connection of all ranks"):
            control.store.set(f"bigbatch/tcp/{env.rank}", f"{where[0]} {where[1]} {self._handshake.nonce.hex()}")

    def send(self, data: memoryview, *, to: int) -> Transfer:
        """Start to send; data must not change until the transfer is done."""
        transfer = Transfer(data, self, is_sent=True)
        link = self._links.get(to) or self._open(to)
        link.outgoing.append(transfer)
        # otherwise it waits its turn: messages of a stream keep their order
        if len(link.outgoing) == 1:
            link.send_ready()
        return transfer

    def receive(self, data: memoryview, *, source: int) -> Transfer:
        transfer = Transfer(data, self, is_sent=False)
        link = self._links.get(source) or self._open(source)
        link.incoming.append(transfer)
        return transfer

    def wait_for(self, transfer: Transfer) -> None:
        """Move all transfers forward until this one is done."""
        self._last_transfer = self._last_check = awake_seconds()
        for link in self._links.values():
            self._move(link)
        while not transfer.done:
            self._step()

    def _step(self) -> None:
        """Wait for any event, for POLL_SECONDS at most, and handle it.

        Only bytes over links restart the count of seconds waited; unauthenticated connections do not.
        """
        for link in self._links.values():
            self._watch(link)
        ready = self._poll.poll(POLL_SECONDS * 1000)
        if self._is_shut:
            raise ConnectionAbortedError("the links were shut down")
        for fd, _ in ready:
            if fd in self._by_fd:
                self._move(self._by_fd[fd])
                self._last_transfer = awake_seconds()
            elif fd in self._unauthenticated:
                self._authenticate(fd)
            else:
                self._accept()
        now = awake_seconds()
        if now - max(self._last_transfer, self._last_check) > POLL_SECONDS:
            self._last_check = now
            while self._unauthenticated and now - next(iter(self._unauthenticated.values()))[2] > HELLO_SECONDS:
                self._drop_oldest_unauthenticated()
            self._while_waiting(now - self._last_transfer)

    def _move(self, link: Link) -> None:
        if link.incoming or link.proof:
            link.receive_ready()
        if link.outgoing:
            link.send_ready()

    def _watch(self, link: Link) -> None:
        # not polled while nothing is expected: poll would return at once for early bytes
        wanted = (select.POLLIN if link.incoming or link.proof else 0) | (select.POLLOUT if link.outgoing else 0)
        if wanted == link.polled:
            return
        if not wanted:
            self._poll.unregister(link.fd)
        else:
            self._poll.register(link.fd, wanted)
        link.polled = wanted

    def _open(self, peer: int) -> Link:
        if peer == self._rank:
            raise ValueError(f"rank {peer} has no link to itself")
        if peer < self._rank:
            self._connect(peer)
        else:
            self._last_transfer = self._last_check = awake_seconds()
            while peer not in self._links:
                self._step()
        return self._links[peer]

    def _connect(self, peer: int) -> None:
        text = self._control.read(f"bigbatch/tcp/{peer}", what=f"connection to rank {peer}")
        address, port, nonce = text.split()
        stream = close_after_fork(socket.socket(family_of(address)))
        stream.settimeout(self._control.timeout_seconds)
        avoid_bbr(stream)
        try:
            stream.connect((address, int(port)))
        except OSError as error:
            stream.close()
            raise CommError(
                f"rank {self._rank} on {self._control.host} cannot connect to rank {peer} on "
                f"{self._control.host_of(peer)} at {address}:{port} ({error}): set comm.interface to the network "
                "interface that all nodes share"
            ) from error
        hello, proof = make_hello(self._control.secret, _name(peer), bytes.fromhex(nonce), rank=self._rank)
        stream.sendall(hello)
        self._add(peer, stream, proof=proof)

    def _accept(self) -> None:
        """Accept a connection, of the expected rank or another; one that stays silent does not block the others."""
        stream = accept_client(self._listener, self._drop_oldest_unauthenticated)
        if stream is None:
            return
        self._unauthenticated[close_after_fork(stream).fileno()] = stream, bytearray(), awake_seconds()
        self._poll.register(stream, select.POLLIN)
        if len(self._unauthenticated) > self._max_unauthenticated:
            self._drop_oldest_unauthenticated()

    def _drop_oldest_unauthenticated(self) -> None:
        if self._unauthenticated:
            fd, (stream, _, _) = next(iter(self._unauthenticated.items()))
            del self._unauthenticated[fd]
            self._poll.unregister(fd)
            stream.close()

    def _authenticate(self, fd: int) -> None:
        """Read more of a connection's hello; close it if it ends or does not know the secret."""
        stream, hello_so_far, _ = self._unauthenticated[fd]
        try:
            # not a byte more: the first message may follow, and the link must read it
            more = stream.recv(HELLO_BYTES - len(hello_so_far))
        except OSError:
            more = b""
        hello_so_far += more
        if more and len(hello_so_far) < HELLO_BYTES:
            return
        del self._unauthenticated[fd]
        self._poll.unregister(fd)
        with suppress(AuthenticationError, OSError):
            if len(hello_so_far) == HELLO_BYTES:
                peer, answer = self._handshake.verify(bytes(hello_so_far))
                if self._rank < peer < self._world_size and peer not in self._links:
                    stream.sendall(answer)  # nothing was sent before, so the kernel accepts it
                    self._add(peer, stream)
                    return
        stream.close()

    def _add(self, peer: int, stream: socket.socket, *, proof: bytes = b"") -> None:
        link = Link(peer, stream, proof=proof)
        self._links[peer] = link
        self._by_fd[link.fd] = link

    def shut_down(self) -> None:
        """End all transfers of both sides with an error. Any thread may call it."""
        self._is_shut = True
        for link in list(self._links.values()):
            with suppress(OSError):  # the peer has ended it
                link.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        for link in self._links.values():
            link.socket.close()
        for stream, _, _ in self._unauthenticated.values():
            stream.close()
        self._unauthenticated.clear()
        self._links.clear()
        self._by_fd.clear()


def _name(rank: int) -> str:
    return f"links of rank {rank}"
