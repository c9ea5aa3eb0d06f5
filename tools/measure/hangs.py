"""Time limit of each measured sum: if an all-reduce algorithm hangs, all ranks learn its name and connect again."""

import json
from collections.abc import Callable, Iterator, Mapping
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
MEASURED = "exchange of measured times"
REPLY_SECONDS = 5.0
"""Further time to wait for rank 0, which names a rank that is late itself."""


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
        _share(HUNG, connection, reduce=list)
        raise _restart_without(connection, error.pending) from None
    finally:
        backend.limit(None)


def limit_seconds(connection: Connection) -> float:
    """Return the limit of one sum."""
    return LIMIT_SHARE * connection.control.timeout_seconds


def exchange(value: Any, connection: Connection, *, reduce: Callable[[list[Any]], Any]) -> Any:
    """Return what rank 0's reduce makes of the JSON values of all ranks: all of them would be long to send. Collective.

    Raises: HungError if a sum is late on another rank.
    """
    reduced = _share(value, connection, reduce=reduce)
    if reduced == HUNG:
        raise _restart_without(connection, None)
    return reduced


def _share(value: Any, connection: Connection, *, reduce: Callable[[list[Any]], Any]) -> Any:
    """Return what reduce makes of the values, or HUNG if one of them is that. Collective."""
    connection.order.start_held()  # other ranks may wait in a sum that they started earlier
    control = connection.control
    everyone = [json.loads(text) for text in control.collect_text(json.dumps(value), what=MEASURED)]
    mine = "" if connection.rank else json.dumps(HUNG if HUNG in everyone else reduce(everyone))
    return json.loads(control.tell_all(mine, what=MEASURED, timeout_seconds=control.timeout_seconds + REPLY_SECONDS))


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
