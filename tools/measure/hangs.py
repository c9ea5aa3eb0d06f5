"""Time limit of each measured sum: if an all-reduce algorithm hangs, all ranks learn its name and connect again."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bigbatch.comm.backends.base import Restartable
from bigbatch.comm.backends.in_flight import LateError
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import Connection
from bigbatch.comm.rendezvous.control import Pending

LIMIT_SHARE = 0.25
"""Limit of one sum, as a share of the job's time limit, within which the ranks must also agree on the hung sum."""
HUNG = "hung"
"""Text that a rank whose sum is late sends in an exchange instead of its value."""


class HungError(Exception):
    """An algorithm hangs. The ranks have connected again; earlier communicators may hold groups that have ended."""

    def __init__(self, algorithm: str, seconds: float) -> None:
        super().__init__(
            f"{algorithm} hangs: a sum did not end within {seconds:g} s; it is left out (or raise the timeout)"
        )
        self.algorithm = algorithm

    def reconnect(self, contestants: Mapping[str, Communicator]) -> dict[str, Communicator]:
        """Return communicators of the other algorithms, each connected again with its table and wire. Collective."""
        return {name: each.with_algorithm(name) for name, each in contestants.items() if name != self.algorithm}


def sum_label(what: str, algorithm: str) -> str:
    """Return the label of a sum; it ends with the algorithm, so that the label of a hung sum names the algorithm."""
    return f"{what} by {algorithm}"


@contextmanager
def limited(connection: Connection) -> Iterator[None]:
    """Limit each sum inside the block. For MPI and Horovod only the job's limit applies, which ends the job.

    Collective. Raises: HungError on all ranks if a sum is late on any.
    """
    backend = connection.backend
    if not isinstance(backend, Restartable):
        yield
        return
    backend.limit(limit_seconds(connection))
    try:
        yield
    except LateError as error:
        # the other ranks reach an exchange, or their limit in a later sum, which lacks this rank
        connection.gather(HUNG)
        raise _restart_without(connection, error.pending) from None
    finally:
        backend.limit(None)


def limit_seconds(connection: Connection) -> float:
    """Return the limit of one sum."""
    return LIMIT_SHARE * connection.control.timeout_seconds


def exchange(value: Any, connection: Connection) -> list[Any]:
    """Gather a JSON value of every rank. Collective. Raises: HungError if a sum is late on another rank."""
    everyone = connection.gather(value)
    if HUNG in everyone:
        raise _restart_without(connection, None)
    return everyone


def _restart_without(connection: Connection, late: Pending | None) -> HungError:
    """Agree on the sum that hangs, the earliest late one, connect again, and return the error. Collective."""
    backend = connection.backend
    assert isinstance(backend, Restartable)
    mine = [backend.num_submitted(), late and [late.number, late.label]]
    everyone = connection.gather(mine)
    _, label = min(late for _, late in everyone if late)
    num_missed = max(count for count, _ in everyone) - backend.num_submitted()
    for _ in range(num_missed):  # the ranks' counts of operations stay equal
        connection.control.detector.begin()
    backend.restart(num_missed=num_missed)
    return HungError(label.rpartition(" by ")[2], limit_seconds(connection))
