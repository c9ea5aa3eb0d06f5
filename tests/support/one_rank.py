"""One rank without others; its sum may play several ranks that hold the same."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.base import Backend, InFlight
from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import Connection
from bigbatch.comm.rendezvous.alone import AloneControl
from bigbatch.comm.rendezvous.control import OperationFacts
from bigbatch.comm.rendezvous.environ import ALONE, ProcessEnv
from bigbatch.comm.rendezvous.topology import make_topology
from bigbatch.comm.transport import Transport

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

    transport = transport_over(backend, env=replace(ALONE, world_size=world_size), device=device)
    return Communicator(transport, "native", all_reduce_, Wire())


def transport_over(
    backend: Backend | None = None,
    *,
    env: ProcessEnv = ALONE,
    control: Any = None,
    device: str = "cpu",
    watch: Any = None,
    **parts: Any,
) -> Transport:
    """Make the transport of one rank over a backend that a test plays. parts: optional ones of the transport."""
    control = control or AloneControl(env, timeout_seconds=60.0, warn_seconds=10.0)
    connection = Connection(env, control, backend or SingleBackend(), make_topology([env.host], rank=0), watch=watch)
    return Transport(connection, torch.device(device), **parts)


class RecordingBackend(SingleBackend):
    """Records the label of what is submitted, and for which ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.ranks: list[tuple[int, ...] | None] = []

    def submit(self, operation: Callable[[], None], **facts: "Unpack[OperationFacts]") -> InFlight:
        """Submit as usual."""
        self.events.append(facts["label"])
        self.ranks.append(facts.get("ranks"))
        return super().submit(operation, **facts)
