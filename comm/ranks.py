"""What summing gradients needs of the other ranks: the interface between comm.gradients and a connection."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bigbatch.comm.algorithms.wire import Wire
    from bigbatch.comm.backends.base import Backend, InFlight
    from bigbatch.comm.operation_order import OperationOrder
    from bigbatch.comm.rendezvous.control import OperationFacts
    from bigbatch.comm.timeline import Timeline


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
    def transport_device(self) -> torch.device: ...

    @property
    def backend(self) -> "Backend": ...

    @property
    def all_reduce_(self) -> Callable[[Tensor], None]: ...

    @property
    def algorithm(self) -> str: ...

    @property
    def wire(self) -> "Wire": ...

    @property
    def order(self) -> "OperationOrder": ...

    @property
    def timeline(self) -> "Timeline": ...

    def with_algorithm(self, algorithm: str, *, wire: "Wire | None" = None) -> "Ranks": ...

    def algorithm_for(self, tensor_N: Tensor) -> str: ...

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor: ...

    def allocate_all(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]: ...

    def release(self, tensor_N: Tensor) -> None: ...

    def start(self, tensor_N: Tensor, *, label: str) -> "InFlight": ...

    def sum_(self, tensor_N: Tensor, *, label: str) -> Tensor: ...

    def start_collective(
        self, collective_: Callable[[Tensor], None], tensor_N: Tensor, *, label: str, algorithm: str, wire: "Wire"
    ) -> "InFlight": ...

    def submit(self, operation: Callable[[], None], **facts: "Unpack[OperationFacts]") -> "InFlight": ...

    def gather(self, value: Any) -> list[Any]: ...

    def gather_text(self, text: str) -> list[str]: ...

    def agree(self, what: str, text: str) -> None: ...
