"""What the ranks of a test job do: `probe.py MODE [ARGUMENT ...]`, under any launcher. Prints one JSON line."""

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

PORT = 18_515
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
OPENMPI = tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))


def numbers() -> list[int]:
    """Rank, world size, local rank, local size."""
    return [int(os.environ[name]) for name in (TORCHRUN if "RANK" in os.environ else OPENMPI)]


def who(*arguments: str) -> dict[str, object]:
    """Return where this process runs."""
    name = socket.gethostname()
    facts: dict[str, object] = {"host": name, "address": socket.gethostbyname(name), "arguments": arguments}
    facts["master"] = os.environ.get("MASTER_ADDR")
    return facts | {"interfaces": sorted(os.listdir("/sys/class/net")), "shm": os.listdir("/dev/shm")}


def stream(num_bytes: str) -> dict[str, object]:
    """Rank 0 sends to the last rank and waits for a byte: how fast, with the connection up and warm."""
    total, chunk = int(num_bytes), bytearray(1 << 20)
    peer = connect()
    if numbers()[0] == 0:
        sent = send(peer, total // 4, chunk)  # congestion control finds the rate
        start = time.perf_counter()
        sent += send(peer, total, chunk)
        return {"mbit_per_s": total * 8e-6 / (time.perf_counter() - start), "sent_bytes": sent}
    for amount in (total // 4, total):
        while amount:
            amount -= peer.recv_into(chunk, min(amount, len(chunk)))
        peer.sendall(b"k")
    return {}


def send(peer: socket.socket, amount: int, chunk: bytearray) -> int:
    """Send so much and wait until it has arrived."""
    for start in range(0, amount, len(chunk)):
        peer.sendall(memoryview(chunk)[: amount - start])
    assert peer.recv(1) == b"k"
    return amount


def round_trips(count: str) -> dict[str, object]:
    """Rank 0 sends a byte to the last rank and gets it back."""
    peer = connect()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    seconds = []
    for _ in range(int(count)):
        start = time.perf_counter()
        if numbers()[0] == 0:
            peer.sendall(b"x")
        peer.sendall(peer.recv(1)) if numbers()[0] else peer.recv(1)
        seconds.append(time.perf_counter() - start)
    return {} if numbers()[0] else {"us": [round(each * 1e6) for each in sorted(seconds)]}


def connect() -> socket.socket:
    """A connection between rank 0 and the last rank; the others wait for nothing."""
    rank, world_size, *_ = numbers()
    if rank == world_size - 1:
        return socket.create_server(("", PORT)).accept()[0]
    if rank != 0:
        raise SystemExit(0)
    deadline = time.monotonic() + 100  # the last rank may start much later
    while time.monotonic() < deadline:
        try:
            return socket.create_connection((os.environ["LAST_HOST"], PORT))
        except ConnectionRefusedError:
            time.sleep(0.02)
    raise SystemExit("the last rank does not listen")


def fail(rank: str, code: str) -> dict[str, object]:
    """One rank ends with a code; the others would continue."""
    if numbers()[0] == int(rank):
        raise SystemExit(int(code))
    time.sleep(600)
    return {}


def linger(folder: str) -> dict[str, object]:
    """Say that we are here, with a child of our own, and stay."""
    if os.fork() == 0:
        os.setsid()  # as a daemon would
        time.sleep(600)
        os._exit(0)
    Path(folder, str(numbers()[0])).touch()
    time.sleep(600)
    return {}


def heed(folder: str) -> dict[str, object]:
    """Say that we are here, wait for the request to stop, and end well."""
    asked: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: asked.append(number))
    Path(folder, str(numbers()[0])).touch()
    while not asked:
        time.sleep(0.02)
    return {"signal": signal.Signals(asked[0]).name}


if __name__ == "__main__":
    modes = {each.__name__: each for each in (who, stream, round_trips, fail, linger, heed)}
    found = modes[sys.argv[1]](*sys.argv[2:])
    if found:
        rank, world_size, local_rank, local_size = numbers()
        place = {"rank": rank, "world_size": world_size, "local_rank": local_rank, "local_size": local_size}
        sys.stdout.write(json.dumps(place | found) + "\n")  # in one piece: all ranks write to one pipe
