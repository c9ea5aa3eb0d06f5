"""What summing gradients needs of the other ranks: the interface between comm.gradients and a communicator."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from bigbatch.comm.algorithms.wire import Wire
    from bigbatch.comm.backends.base import InFlight
    from bigbatch.comm.transport import Transport


@runtime_checkable
class Ranks(Protocol):
    """The ranks of a job and an all-reduce over them, as connect() returns them; see Communicator."""

    @property
    def rank(self) -> int: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def transport(self) -> "Transport": ...

    @property
    def all_reduce_(self) -> Callable[[Tensor], None]: ...

    @property
    def algorithm(self) -> str: ...

    @property
    def wire(self) -> "Wire": ...

    def with_algorithm(self, algorithm: str, *, wire: "Wire | None" = None) -> "Ranks": ...

    def algorithm_for(self, tensor_N: Tensor) -> str: ...

    def start(self, tensor_N: Tensor, *, label: str) -> "InFlight": ...

    def sum_(self, tensor_N: Tensor, *, label: str) -> Tensor: ...

    def gather(self, value: Any) -> list[Any]: ...

    def agree(self, what: str, text: str) -> None: ...
