"""Transport of a job of one process: every tensor is its own sum."""

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from bigbatch.comm.backends.base import Capabilities, Group, InFlight
from bigbatch.comm.rendezvous.control import OperationFacts, Pending
from bigbatch.errors import CommError


class SingleBackend:
    """Backend of a job of one process, so that no caller must check whether a job is distributed."""

    name = "single"
    rank = 0
    world_size = 1
    world = Group((0,))
    capabilities = Capabilities(("cpu", "cuda"))

    def __init__(self, *, is_alone: bool = True) -> None:
        """is_alone: the caller wants one rank; else submit() refuses a process group made after connect()."""
        self._is_alone = is_alone

    def new_group(self, families: Sequence[Sequence[int]]) -> Group:
        return Group(tuple(families[0]))

    def all_reduce_(self, tensor_N: Tensor, group: Group) -> None:
        """Leave the tensor: it is the sum over one rank."""

    def reduce_(self, tensor_N: Tensor, group: Group, *, root: int) -> None:
        """Leave the tensor: it is the sum over one rank."""

    broadcast_ = reduce_

    def reduce_scatter(self, shard_M: Tensor, tensor_N: Tensor, group: Group) -> None:
        shard_M.copy_(tensor_N)

    def all_gather(self, tensor_N: Tensor, shard_M: Tensor, group: Group) -> None:
        tensor_N.copy_(shard_M)

    def start_send(self, tensor_N: Tensor, *, to: int) -> InFlight:
        raise ValueError("the only rank has no rank to send to: use start_exchange(), which copies")

    def start_receive(self, tensor_N: Tensor, *, source: int) -> InFlight:
        raise ValueError("the only rank has no rank to receive from: use start_exchange(), which copies")

    def start_exchange(self, *, send: Tensor, to: int, receive: Tensor, source: int) -> InFlight:
        receive.copy_(send)
        return InFlight()

    def submit(self, operation: Callable[[], None], **facts: Unpack[OperationFacts]) -> InFlight:
        if not self._is_alone and dist.is_initialized() and dist.get_world_size() > 1:
            raise CommError(
                f"{facts['label']}: this connection has one rank, but torch's process group has "
                f"{dist.get_world_size()}: call connect() after init_process_group()"
            )
        operation()
        return InFlight()

    def oldest(self) -> Pending | None:
        return None

    def close(self) -> None:
        """Return: there is nothing to release."""

    abandon = abort = close
