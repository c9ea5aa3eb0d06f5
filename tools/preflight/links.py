"""Measure which nodes reach each other, and how fast."""

import socket
import struct
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import islice
from statistics import median

import torch
from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.trainer.machine.host import seconds_of

CONNECT_SECONDS = 3.0
CONNECT_THREADS = 256
MAX_ROUNDS = {"cpu": 15, "cuda": 5}
"""Most rounds of pairs. With more nodes, each one is paired with some of the others only, which suffices to measure its
own link; NCCL needs time to connect two ranks."""
PROBE_BYTES = 256 << 10
MAX_BYTES = 256 << 20
AIM_SECONDS = 0.15
REPEATS = 3


@contextmanager
def listening(address: str) -> Iterator[int]:
    """Open a port of address to which other nodes can connect, and yield its number; nothing is read."""
    with socket.create_server((address, 0), backlog=1024) as server:
        server.settimeout(0.1)
        end = threading.Event()
        thread = threading.Thread(target=_accept_connections, args=(server, end), daemon=True)
        thread.start()
        try:
            yield server.getsockname()[1]
        finally:
            end.set()
            thread.join()


def _accept_connections(server: socket.socket, end: threading.Event) -> None:
    """Accept connections until end is set: they would fill the kernel's queue, which may be as short as 128."""
    while not end.is_set():
        with suppress(OSError):
            server.accept()[0].close()


def unreachable(nodes: Sequence[tuple[str, int]]) -> list[int]:
    """Return the positions in nodes of each (address, port) to which no connection succeeds."""

    def fails(where: tuple[str, int]) -> bool:
        try:
            with socket.create_connection(where, timeout=CONNECT_SECONDS) as stream:
                # close by a reset, so that no port stays in TIME_WAIT when the job connects
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            return True
        return False

    with ThreadPoolExecutor(CONNECT_THREADS) as pool:
        return [index for index, is_bad in enumerate(pool.map(fails, nodes)) if is_bad]


def rounds_of_pairs(count: int) -> Iterator[list[tuple[int, int]]]:
    """Yield rounds of pairs of count nodes: every pair once, a node at most once per round (circle method)."""
    places: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    for _ in range(len(places) - 1):
        half = len(places) // 2
        met = zip(places[:half], reversed(places[half:]), strict=True)
        yield [(min(a, b), max(a, b)) for a, b in met if a is not None and b is not None]
        # the first one stays, all others move by one place
        places = [places[0], places[-1], *places[1:-1]]


def measure_pairs(communicator: Communicator, leaders: Sequence[int], *, of: Collection[int]) -> dict[int, float]:
    """Return position in leaders -> bytes per second, each way, between it and this leader; pairs measure in parallel.

    of: positions of which each pair has one. Only leaders call it.
    """
    own = leaders.index(communicator.rank)
    rates = {}
    for pairs in islice(rounds_of_pairs(len(leaders)), MAX_ROUNDS[communicator.device.type]):
        for pair in pairs:
            if own in pair and not {*pair}.isdisjoint(of):
                other = pair[0] if own == pair[1] else pair[1]
                rates[other] = _measure_pair(communicator, leaders[other])
    return rates


def _measure_pair(communicator: Communicator, other: int) -> float:
    probe = min(_exchange(communicator, other, num_bytes=PROBE_BYTES) for _ in range(2))
    size = torch.zeros(1, dtype=torch.float64, device=communicator.device)
    if communicator.rank < other:
        # both must exchange the same number of bytes: the lower rank decides, by its own time
        size.fill_(min(MAX_BYTES, max(PROBE_BYTES, PROBE_BYTES * AIM_SECONDS / probe)))
        communicator.transport.backend.start_send(size, to=other).wait()
    else:
        communicator.transport.backend.start_receive(size, source=other).wait()
    num_bytes = int(size.item())
    return num_bytes / median(_exchange(communicator, other, num_bytes=num_bytes) for _ in range(REPEATS))


def _exchange(communicator: Communicator, other: int, *, num_bytes: int) -> float:
    """Return the seconds to send num_bytes and receive as many at the same time."""
    send_N: Tensor = torch.zeros(num_bytes, dtype=torch.uint8, device=communicator.device)
    receive_N = torch.empty_like(send_N)
    start = communicator.transport.backend.start_exchange
    return seconds_of(lambda: start(send=send_N, to=other, receive=receive_N, source=other).wait(), communicator.device)
