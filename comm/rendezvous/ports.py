"""Ports at which a job's ranks meet: chosen, and held from then on until rank 0 serves its store there."""

import secrets
import socket
from contextlib import suppress
from pathlib import Path

from bigbatch.comm.rendezvous.addresses import family_of, loopback

FIRST_JOB_PORT = 20000
NUM_JOB_PORTS = 12000
"""Ports 20000 to 31999: Linux uses ports from 32768 on for outgoing connections, if not set otherwise."""
OUTGOING = Path("/proc/sys/net/ipv4/ip_local_port_range")
MAX_TRIES = 100
BACKLOG = 4096
"""All ranks of a large job may connect at once."""


def hold_port(address: str, *, listens: bool = True) -> socket.socket:
    """Return a socket that listens on a free port of this address, so that no other process can take the port.

    listens: False only binds it, so that a script's rank 0 can open a store of torch there. Other searches for a free
    port, and outgoing connections, still avoid the port.
    """
    for port in (*_job_ports(), 0):
        holder = socket.socket(family_of(address))
        try:
            holder.bind((address, port))
            if listens:
                holder.listen(BACKLOG)
            else:
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        except OSError:
            holder.close()
            if port == 0:
                raise
        else:
            break
    return holder


def adopt(descriptor: int, *, port: int) -> socket.socket | None:
    """Return the inherited socket of hold_port, which listens; None if the descriptor is another, as in a child."""
    with suppress(OSError):
        holder = socket.socket(fileno=descriptor)
        if holder.getsockname()[1:2] == (port,):
            holder.listen(BACKLOG)
            return holder
        holder.detach()
    return None


def free_port() -> int:
    """Return a port of the loopback interface that is free now."""
    with hold_port(loopback()) as holder:
        return int(holder.getsockname()[1])


def _job_ports() -> list[int]:
    """Return MAX_TRIES random job ports that outgoing connections do not use; fewer if there are fewer."""
    ports = list(range(FIRST_JOB_PORT, FIRST_JOB_PORT + NUM_JOB_PORTS))
    with suppress(OSError):
        first, last = map(int, OUTGOING.read_text().split())
        ports = [port for port in ports if not first <= port <= last]
    return secrets.SystemRandom().sample(ports, min(len(ports), MAX_TRIES))
