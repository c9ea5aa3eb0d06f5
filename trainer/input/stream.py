"""One rank's batches for the training loop: measures the waits, and repeats a batch after a failure."""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bigbatch.errors import DataError
from bigbatch.trainer.input.base import Batch

if TYPE_CHECKING:
    from bigbatch.comm.communicator import Communicator

BATCHES_BETWEEN_EXCHANGES = 8
"""Longest wait of a rank in an evaluation, in batches, after an input failure or a stop signal."""


@dataclass(frozen=True)
class InputFailure:
    """First step without a batch, and the reason."""

    step: int
    reason: str


class InputStream:
    """Returns a rank's batches. After a failure it returns the last batch again, which must not lead to an update.

    The other ranks are within a step then, and cannot end it alone; all learn of the failure at the next report.
    """

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._last: Batch | None = None
        self.failure: InputFailure | None = None
        self.wait_seconds = 0.0
        self.replaced: dict[int, tuple[int, str]] = {}
        """Position of each bad image replaced since the last take_replaced -> first step, and why."""

    def draw(self, *, step: int) -> Batch:
        """Return the next batch. Raises: DataError if the first one fails."""
        start = time.perf_counter()
        if self.failure is None:
            try:
                self._last = next(self._batches)
                for bad in self._last.replaced:
                    self.replaced.setdefault(bad.position, (step, bad.reason))
            except DataError as error:
                if self._last is None:  # then there is none to repeat until the next report
                    raise
                self.failure = InputFailure(step, str(error))
        self.wait_seconds += time.perf_counter() - start
        assert self._last is not None
        return self._last

    def take_wait_seconds(self) -> float:
        """Return the seconds spent in draw since the last call."""
        seconds, self.wait_seconds = self.wait_seconds, 0.0
        return seconds

    def take_replaced(self, *, before: int) -> dict[int, str]:
        """Return position -> reason of bad images since the last call; drops those of step `before` and later."""
        replaced, self.replaced = self.replaced, {}
        return {position: reason for position, (step, reason) in replaced.items() if step < before}


def gather_replaced(communicator: "Communicator", replaced: Mapping[int, str]) -> dict[int, str]:
    """Return position -> reason of the bad images of all ranks, in rank order. Collective."""
    together: dict[int, str] = {}
    for pairs in communicator.gather(list(replaced.items())):
        together |= dict(pairs)
    return together
