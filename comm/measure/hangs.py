"""A limit of its own for each measured form of the all-reduce: one that hangs is named, and the ranks connect again."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bigbatch.comm.backends.base import Restartable
from bigbatch.comm.backends.in_flight import LateError
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.rendezvous.watch import Pending

SHARE = 0.25
"""Limit of one sum, as a share of the job's time limit: the ranks must still meet within that."""
HUNG = "hung"
"""What a rank whose sum is late gives to the next exchange, or to one of its own."""


class HungError(Exception):
    """A form hangs. The ranks are connected again by then: communicators made before may hold what has ended."""

    def __init__(self, form: str, seconds: float) -> None:
        super().__init__(f"{form} hangs: a sum did not end within {seconds:g} s; the others are measured without it")
        self.form = form


def form_label(what: str, form: str) -> str:
    """Return the label of a sum, from which a hung one's form is known."""
    return f"{what} by {form}"


@contextmanager
def limited(communicator: Communicator) -> Iterator[None]:
    """Limit each sum inside the block. NCCL's, MPI's and Horovod's have no limit but the job's, at which it ends.

    Collective. Raises: HungError on all ranks if a sum is late on any.
    """
    backend = communicator.backend
    if not isinstance(backend, Restartable):
        yield
        return
    backend.limit(limit_seconds(communicator))
    try:
        yield
    except LateError as error:
        # the others come to an exchange, or to the limit in a later sum, in which this rank is missing
        communicator.gather_text(json.dumps(HUNG))
        raise _leave_behind(communicator, error.pending) from None
    finally:
        backend.limit(None)


def limit_seconds(communicator: Communicator) -> float:
    """Return the limit of one sum."""
    return SHARE * communicator.control.timeout_seconds


def exchange(value: Any, communicator: Communicator) -> list[Any]:
    """Gather a JSON value of every rank. Collective. Raises: HungError if a sum is late on another rank."""
    everyone = [json.loads(text) for text in communicator.gather_text(json.dumps(value))]
    if HUNG in everyone:
        raise _leave_behind(communicator, None)
    return everyone


def _leave_behind(communicator: Communicator, late: Pending | None) -> HungError:
    """Agree on the sum that hangs, the earliest that is late on a rank, and connect again. Collective."""
    backend = communicator.backend
    assert isinstance(backend, Restartable)
    mine = [backend.num_submitted(), late and [late.number, late.label]]
    everyone = [json.loads(text) for text in communicator.gather_text(json.dumps(mine))]
    _, label = min(late for _, late in everyone if late)
    num_missed = max(count for count, _ in everyone) - backend.num_submitted()
    for _ in range(num_missed):  # the ranks' counts of operations stay equal
        communicator.control.detector.begin()
    backend.restart(num_missed=num_missed)
    return HungError(label.rpartition(" by ")[2], limit_seconds(communicator))
