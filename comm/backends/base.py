"""The contract of a transport, and how it fails."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from bigbatch.errors import UserError


class CommError(UserError, RuntimeError):
    """Communication could not be set up or carried out; the message says what to do."""


class PeerLostError(CommError):
    """A peer died or stalled; the message names operation, seconds waited and the missing ranks."""


@dataclass(frozen=True)
class Group:
    """Ranks that take part in a collective, with whatever handle the transport keeps for them."""

    ranks: tuple[int, ...]
    handle: Any = None


class InFlight(Protocol):
    """An operation that was started."""

    def wait(self) -> None:
        """Return once later work on this device may use the result. Raises: PeerLostError."""
        ...


class Backend(Protocol):
    """A transport between the ranks of a job.

    Collectives are called by every rank of the group, in the same order, and leave identical bits on all of
    them. They complete before they return, in the order of the device: on a GPU they are only enqueued.
    """

    name: str
    rank: int
    world_size: int
    world: Group

    def new_group(self, families: Sequence[Sequence[int]]) -> Group:
        """Split the world into families and return this rank's own. Collective over the world."""
        ...

    def all_reduce_(self, tensor_N: Tensor, group: Group) -> None:
        """Sum over the group, in place, by the transport's own algorithm."""
        ...

    def reduce_(self, tensor_N: Tensor, group: Group) -> None:
        """Sum over the group into the group's first rank; the others' tensors are undefined after."""
        ...

    def broadcast_(self, tensor_N: Tensor, group: Group) -> None:
        """Copy the tensor of the group's first rank to all of the group."""
        ...

    def reduce_scatter(self, shard_M: Tensor, tensor_N: Tensor, group: Group) -> None:
        """Sum tensor_N over the group; rank i of the group gets the i-th of equal parts in shard_M."""
        ...

    def all_gather(self, tensor_N: Tensor, shard_M: Tensor, group: Group) -> None:
        """Concatenate the group's shards, in the group's order, into tensor_N."""
        ...

    def exchange(self, *, send: Tensor, to: int, receive: Tensor, source: int) -> None:
        """One hop of a ring: send to one global rank while receiving from another."""
        ...

    def all_gather_text(self, text: str) -> list[str]:
        """A short text of every rank, in rank order. Collective over the world."""
        ...

    def submit(self, operation: Callable[[], None], *, label: str) -> InFlight:
        """Start an operation made of collectives; submitted operations run one after another."""
        ...

    def close(self) -> None:
        """Release the transport after the last collective; collective itself."""
        ...
