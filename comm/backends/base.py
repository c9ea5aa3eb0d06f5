"""The contract of a transport: its operations and its errors."""

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from typing_extensions import Unpack

from bigbatch.comm.rendezvous.control import OperationFacts, Pending
from bigbatch.errors import ArgumentError

REMEDY = (
    "all ranks must start the same operations, with tensors of equal size, in the same order. If some ranks have no "
    "gradients, call wait() or synchronize() before any other sum"
)
"""What to do about ranks that start different operations."""
HALF = (torch.float16, torch.bfloat16)
ALL_DTYPES = (torch.float64, torch.float32, *HALF, torch.int64)


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name in configs and tables, such as float16."""
    return str(dtype).removeprefix("torch.")


def require_type(value: object, kind: type, *, what: str, legal: str) -> None:
    """Refuse an argument of another type. Raises: ArgumentError, a TypeError, with its name and a legal value."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ArgumentError(f"{what} must be {legal}, not {reprlib.repr(value)} ({type(value).__name__})")


@dataclass(frozen=True)
class Group:
    """The ranks that take part in a collective, with the transport's handle for them."""

    ranks: tuple[int, ...]
    handle: Any = None


@dataclass(frozen=True)
class Capabilities:
    """What a transport can carry; connect() refuses anything else before any training."""

    device_types: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...] = ALL_DTYPES
    has_messages: bool = True
    """Ranks can send messages to one another, which every algorithm but the transport's own needs."""
    in_place: bool = False
    """The shard of a reduce-scatter or an all-gather may be a view of the whole tensor."""
    sums_half_in_fp32: bool = True
    """Its own sums of half precision are made in fp32 and rounded once; else each addition rounds."""


class InFlight:
    """An operation that has been started: one function that waits for each of its parts; none if it is complete."""

    __slots__ = ("_waits",)

    def __init__(self, *waits: Callable[[], object]) -> None:
        self._waits = waits

    def wait(self) -> None:
        """Return when later work on the device may use the result. Call it once. Raises: PeerLostError."""
        for wait in self._waits:
            wait()


class Backend(Protocol):
    """Carries tensors between the ranks of a job.

    Every rank of the group calls each collective, in the same order; all get identical bits. On a CPU a collective is
    complete when it returns; on a GPU it is only enqueued.
    Messages between two ranks arrive in the order in which they were started. Ranks are those of the world.
    """

    name: str
    rank: int
    world_size: int
    world: Group
    capabilities: Capabilities

    def new_group(self, families: Sequence[Sequence[int]]) -> Group:
        """Make a group of each family of ranks; return this rank's, or a group of itself if it is in none (NCCL only).

        Collective over the world.
        """

    def all_reduce_(self, tensor_N: Tensor, group: Group) -> None:
        """Sum over the group, in place, by the transport's own algorithm."""

    def reduce_(self, tensor_N: Tensor, group: Group, *, root: int) -> None:
        """Sum over the group into rank root; the others' tensors are undefined afterwards."""

    def broadcast_(self, tensor_N: Tensor, group: Group, *, root: int) -> None:
        """Copy the tensor of rank root to all of the group."""

    def reduce_scatter(self, shard_M: Tensor, tensor_N: Tensor, group: Group) -> None:
        """Sum tensor_N over the group; rank i of the group gets the i-th of equal parts in shard_M."""

    def all_gather(self, tensor_N: Tensor, shard_M: Tensor, group: Group) -> None:
        """Concatenate the group's shards, in the group's order, into tensor_N."""

    def start_send(self, tensor_N: Tensor, *, to: int) -> InFlight:
        """Start a message to another rank; tensor_N must not change until its wait() returns."""

    def start_receive(self, tensor_N: Tensor, *, source: int) -> InFlight:
        """Start to receive a message of the tensor's size from another rank."""

    def start_exchange(self, *, send: Tensor, to: int, receive: Tensor, source: int) -> InFlight:
        """Start one hop of a ring: sending to one rank while receiving from another."""

    def submit(self, operation: Callable[[], None], **facts: Unpack[OperationFacts]) -> InFlight:
        """Start an operation made of collectives and messages; submitted operations run one after another.

        All ranks submit the same operations, in the same order. ranks: the participants, if not the whole world. On
        host memory a rank whose operation has another number, label or size than another rank's fails with a CommError.
        """

    def oldest(self) -> Pending | None:
        """Return the first submitted operation that is not known to have ended, or None. Any thread may call it."""

    def close(self) -> None:
        """Release the transport after the last operation. Collective."""

    def abandon(self) -> None:
        """Release what this rank holds, without the other ranks, if connect() refuses. Nothing may be under way."""


@runtime_checkable
class Restartable(Protocol):
    """A transport that can abandon an operation that hangs."""

    def limit(self, seconds: float | None) -> None:
        """Let waits raise LateError after this many seconds; None: only the job's time limit applies."""

    def num_submitted(self) -> int:
        """Return the number of operations submitted so far."""

    def restart(self, *, num_missed: int) -> None:
        """End what is under way and connect again; earlier groups have ended. Collective.

        num_missed: number of operations that another rank has submitted and this one has not.
        """
