"""Control channel: exchange of short texts and failure detection, separate from the data transport. Its types."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, TypedDict

from bigbatch.awake import awake_seconds

if TYPE_CHECKING:
    import torch

    from bigbatch.comm.rendezvous.alone import AloneControl
    from bigbatch.comm.rendezvous.job_control import JobControl

TensorSize = tuple[int, "torch.dtype"]
"""Number of elements, and dtype."""


class _Label(TypedDict):
    label: str


class OperationFacts(_Label, total=False):
    """Options of submit(): fields of the same names of Pending."""

    ranks: tuple[int, ...] | None
    size: TensorSize | None


@dataclass(frozen=True)
class Pending:
    """An operation under way. number: in order of submission. since: awake_seconds()."""

    number: int
    label: str
    since: float
    ranks: tuple[int, ...] | None = None
    """Ranks that take part; None for all."""
    size: TensorSize | None = None
    """Size of the tensor, equal on all ranks; None if the operation has no single tensor."""

    @property
    def seconds(self) -> float:
        return awake_seconds() - self.since


Control: TypeAlias = "JobControl | AloneControl"
"""Exchanges short texts between the ranks of a job, or holds those of its only process."""
