"""Transport of the tensors of a connection: memory, copies between GPU and host, and the queue of operations."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import Tensor
from typing_extensions import Unpack

from bigbatch.comm.algorithms.by_name import ALGORITHMS
from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.base import Backend, InFlight, dtype_name, require_type
from bigbatch.comm.connection import Connection
from bigbatch.comm.rendezvous.control import OperationFacts
from bigbatch.parts import load

if TYPE_CHECKING:
    from bigbatch.comm.backends.host_staging import HostStaging
    from bigbatch.comm.backends.node_memory import NodeMemory
    from bigbatch.comm.backends.registered_memory import RegisteredMemory
    from bigbatch.comm.timeline import Timeline

Collective = Callable[[Tensor], None]
"""Works on a flat tensor in place, together with the other ranks."""


def make_transport(connection: Connection, *, device: torch.device, buffers: str = "torch") -> "Transport":
    """Return the transport of tensors on this device. buffers: see connect(); collective unless it is "torch"."""
    backend, memory, staging, registered = connection.backend, None, None, None
    is_native = device.type in backend.capabilities.device_types
    shares_memory = backend.capabilities.has_messages and not (is_native and device.type == "cuda")
    if shares_memory and (connection.world_size > 1 or not is_native):
        memory = load("bigbatch.comm.backends.node_memory.NodeMemory")(connection.topology, connection.control)
    if not is_native:
        staging = load("bigbatch.comm.backends.host_staging.HostStaging")(device)
    if buffers != "torch" and backend.name == "nccl":
        with connection.watched("registration of a first buffer"):
            registered = backend.register(device, is_symmetric=buffers == "symmetric")  # type: ignore[attr-defined]
    return Transport(connection, device, memory, staging, registered, buffers)


@dataclass(eq=False)
class Transport:
    """Runs collectives on flat tensors of one device, over all ranks of a connection."""

    connection: Connection
    device: torch.device
    memory: "NodeMemory | None" = None
    """Memory that the ranks of a node share, if the backend reads host tensors; else None."""
    staging: "HostStaging | None" = None
    """Host copies of GPU tensors, if the backend reads only host tensors; else None."""
    registered: "RegisteredMemory | None" = None
    """Memory of allocate() that NCCL sums without copies; else None."""
    buffers: str = "torch"
    """Argument of connect(); measured times are valid only for it."""
    timeline: "Timeline | None" = None
    """Records the operations while it is set."""

    @property
    def backend(self) -> Backend:
        return self.connection.backend

    @property
    def backend_device(self) -> torch.device:
        """Return the device from which the backend reads tensors: the CPU if GPU tensors are staged."""
        return self.device if self.staging is None else torch.device("cpu")

    @property
    def is_timed_by_host(self) -> bool:
        """Return whether a host thread waits for each operation, so that the host's clock times it."""
        return self.staging is not None or self.backend.name in ("mpi", "horovod")

    @property
    def algorithms(self) -> tuple[str, ...]:
        """List the algorithms that the backend can run, except hybrid, which needs a table."""
        return (
            tuple(name for name in ALGORITHMS if name != "hybrid")
            if self.backend.capabilities.has_messages
            else ("native",)
        )

    def allocate(self, *sizes: tuple[int, torch.dtype]) -> list[Tensor]:
        """Make flat tensors of zeros that travel without copies, from (num_elements, dtype). Collective.

        Several in one call take the time of one.
        """
        if self.registered is not None:
            with self.connection.watched("registration of buffers"):
                return [self.registered.allocate(*size) for size in sizes]
        if self.memory is None or self.staging is not None:
            return [torch.zeros(count, dtype=dtype, device=self.device) for count, dtype in sizes]
        return self.memory.allocate(*sizes)

    def release(self, tensor_N: Tensor) -> None:
        """Free a tensor of allocate(), which must not be used afterwards. All ranks call it."""
        if self.registered is not None:
            self.registered.release(tensor_N)
        elif self.memory is not None and self.staging is None:
            self.memory.release(tensor_N)

    def start(self, collective_: Collective, tensor_N: Tensor, *, label: str, algorithm: str, wire: Wire) -> InFlight:
        """Start a collective on a flat tensor, in place, over all ranks. algorithm and wire name it in a trace.

        A host tensor that is not from allocate() is copied to shared memory and back.
        Raises: TypeError if it is not a tensor; ValueError for one on another device, not flat, or of a dtype that the
        backend cannot sum.
        """
        is_flat = isinstance(tensor_N, Tensor) and tensor_N.dim() == 1 and tensor_N.is_contiguous()
        if not (is_flat and tensor_N.device == self.device and tensor_N.dtype in self.backend.capabilities.dtypes):
            self._refuse(tensor_N)
        tensor_N = tensor_N.detach() if tensor_N.requires_grad else tensor_N  # in place: autograd refuses a leaf
        if self.memory is not None and tensor_N.numel():
            operation = self.memory.operation(collective_, tensor_N, self.staging, finish=self._finish_all, label=label)
        else:
            operation = partial(collective_, tensor_N) if tensor_N.numel() else lambda: None
        if self.timeline is not None:
            facts = {"algorithm": algorithm, "bytes": tensor_N.nbytes, "wire": dtype_name(wire.of(tensor_N))}
            operation = self.timeline.of_sum(operation, label, on_host=self.is_timed_by_host, **facts)
        work = self.submit(operation, label=label, size=(tensor_N.numel(), tensor_N.dtype))
        return work if self.staging is None else InFlight(work.wait, self.staging.join)

    def submit(self, operation: Callable[[], None], **facts: Unpack[OperationFacts]) -> InFlight:
        """Start an operation of the backend, after the sums that a GradientReducer holds; see Backend.submit()."""
        order = self.connection.order
        order.start_held()
        # eager steps have counted the operations of a capture, which may fail on one rank alone
        if facts.get("ranks") is None and not (order.is_compared and torch.cuda.is_current_stream_capturing()):
            self.connection.control.detector.begin()
            if order.is_compared:
                order.note(facts["label"], facts.get("size"))
        return self.backend.submit(operation, **facts)

    def _finish_all(self) -> None:
        """Wait until all ranks have ended the operations so far."""
        # with a message, by which a rank notices another one that does not call this
        one_1 = torch.zeros(1)
        self.submit(lambda: self.backend.all_reduce_(one_1, self.backend.world), label="growth of shared memory").wait()

    def _refuse(self, tensor_N: Tensor) -> NoReturn:
        require_type(tensor_N, Tensor, what="tensor", legal="a torch.Tensor, such as torch.tensor(1.0)")
        if tensor_N.device != self.device:
            raise ValueError(f"a tensor on {tensor_N.device} cannot be summed: ranks communicate on {self.device}")
        if tensor_N.dtype not in self.backend.capabilities.dtypes:
            names = ", ".join(map(dtype_name, self.backend.capabilities.dtypes))
            raise ValueError(f"{self.backend.name} cannot sum {tensor_N.dtype}; it sums {names}")
        raise ValueError(f"only a flat, contiguous tensor can be summed, not one of shape {tuple(tensor_N.shape)}")
