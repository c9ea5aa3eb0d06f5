"""A switch in user space that forwards packets after a fixed delay, for kernels with or without netem.

It reads and writes the switch's end of each link by packet sockets. With their virtio header TCP's large packets pass
whole, so that even Python reaches some Gbit/s; the kernel limits the rate, at the links' ends.
"""

import gc
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

from bigbatch.tools.emulate.plan import mac

ETH_P_ALL = 0x0003
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
SO_SNDBUFFORCE, SO_RCVBUFFORCE = 32, 33
SO_TIMESTAMPNS = 35
TIME = struct.Struct("=qq")
BUFFER_BYTES = 8 << 20
VNET_HEADER_BYTES = 10
LARGEST_BYTES = VNET_HEADER_BYTES + 14 + 65_536
MAX_PER_TURN = 16
LATEST_NS = 1_000_000
"""Longest plausible wake-up; a longer one means that the clock was set."""


def open_port(device: str) -> socket.socket:
    """Open a socket for all packets in and out of a device of this network namespace. Raises: OSError."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    # else the switch would read its own packets, and forward broadcasts for ever
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    for plain, forced in ((socket.SO_SNDBUF, SO_SNDBUFFORCE), (socket.SO_RCVBUF, SO_RCVBUFFORCE)):
        port.setsockopt(socket.SOL_SOCKET, plain, BUFFER_BYTES)  # up to the system's limit
        with suppress(PermissionError):  # root may pass it
            port.setsockopt(socket.SOL_SOCKET, forced, BUFFER_BYTES)
    port.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    port.bind((device, 0))
    port.setblocking(False)
    return port


def destinations(packet: bytes, *, source: int, addresses: Sequence[bytes]) -> Sequence[int]:
    """Return the ports for a packet: the one of its address, or all others for a broadcast."""
    target = packet[VNET_HEADER_BYTES : VNET_HEADER_BYTES + 6]
    # the lowest bit of the first byte: broadcast and multicast
    if target[0] & 1:
        return [port for port in range(len(addresses)) if port != source]
    return [port for port, address in enumerate(addresses) if address == target and port != source]


def age_ns(ancillary: Sequence[tuple[int, int, bytes]]) -> int:
    """Return the age of a packet by the kernel's time stamp: the delay counts from there, even if we are late."""
    for _, kind, stamp in ancillary:
        if kind == SO_TIMESTAMPNS:
            seconds, nanoseconds = TIME.unpack(stamp)
            return min(max(0, time.time_ns() - seconds * 1_000_000_000 - nanoseconds), LATEST_NS)
    return 0


def forward(ports: Sequence[socket.socket], *, delay_us: int) -> NoReturn:
    """Forward packets for ever. A port with a full queue drops them, like a real switch.

    As root the process gets real-time priority: busy ranks must not lengthen the delay.
    """
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    gc.disable()  # no cycles here, and no pauses
    addresses = [bytes.fromhex(mac(node).replace(":", "")) for node in range(len(ports))]
    number = {port: index for index, port in enumerate(ports)}
    waiting: deque[tuple[int, int, bytes]] = deque()  # due time in ns, port, packet; in order, as the delay is fixed
    while True:
        now = time.monotonic_ns()
        while waiting and waiting[0][0] <= now:
            _, target, packet = waiting.popleft()
            with suppress(OSError):  # full, or the link is down
                ports[target].send(packet)
        # until the next packet is due; with none waiting, until one comes
        seconds = max(0, waiting[0][0] - time.monotonic_ns()) / 1e9 if waiting else None
        for port in select.select(ports, (), (), seconds)[0]:
            # bounded, so that one busy port delays neither the others nor packets that are due
            for _ in range(MAX_PER_TURN):
                try:
                    packet, ancillary, _, _ = port.recvmsg(LARGEST_BYTES, socket.CMSG_SPACE(TIME.size))
                except BlockingIOError:
                    break
                # the time stamp is of the clock that can be set, so only its age is used
                due = time.monotonic_ns() + delay_us * 1000 - age_ns(ancillary)
                targets = destinations(packet, source=number[port], addresses=addresses)
                waiting += [(due, target, packet) for target in targets]
