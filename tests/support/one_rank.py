"""One rank without others; its sum may play several ranks that hold the same."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bigbatch.comm.backends.base import Backend, InFlight
from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import connect
from bigbatch.comm.rendezvous.control import OperationFacts
from bigbatch.comm.rendezvous.environ import ALONE

if TYPE_CHECKING:
    from typing_extensions import Unpack


def alone(
    backend: Backend | None = None,
    *,
    factor: int = 1,
    world_size: int = 1,
    sums: list[int] | None = None,
    device: str = "cpu",
) -> Communicator:
    """Connect one rank whose sum is factor times its own part; sums, if given, records the sizes of summed tensors."""

    def all_reduce_(tensor_N: Tensor) -> None:
        tensor_N.mul_(factor)
        if sums is not None:
            sums.append(tensor_N.numel())

    one = connect(env=ALONE, device=torch.device(device))
    env = replace(ALONE, world_size=world_size)
    return replace(one, env=env, backend=backend or one.backend, all_reduce_=all_reduce_)


class RecordingBackend(SingleBackend):
    """Records the label of what is submitted, and for which ranks."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.ranks: list[tuple[int, ...] | None] = []

    def submit(self, operation: Callable[[], None], **facts: "Unpack[OperationFacts]") -> InFlight:
        """Submit as usual."""
        self.events.append(facts["label"])
        self.ranks.append(facts.get("ranks"))
        return super().submit(operation, **facts)
