"""Run the work of a training step on the device, kernel by kernel; cuda_graph.py replays captured steps instead."""

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from bigbatch.trainer.input.prepare_batch import Prepared

Work: TypeAlias = "Callable[[Iterable[tuple[Prepared, bool]]], Tensor]"
"""Computes a step on the device from pairs (microbatch, whether it is the step's last)."""


class Execution(Protocol):
    """Runs the work of each step."""

    measures_waits: bool
    """Whether Python sees each step, so that the reducer can measure waits, and count what its grid rounds to 0."""

    def __call__(self, work: Work, microbatches: "Iterator[tuple[Prepared, bool]]") -> Tensor:
        """Run a step; return what the work returns."""
        ...

    def close(self) -> None:
        """Free what was captured, before the communicator closes."""


class EagerExecution:
    """Runs each kernel when Python calls it."""

    measures_waits = True

    def __call__(self, work: Work, microbatches: "Iterator[tuple[Prepared, bool]]") -> Tensor:
        return work(microbatches)

    def close(self) -> None:
        """Do nothing: there are no graphs to destroy."""
