"""The ranks of a job, connected: transport, topology and the chosen all-reduce."""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bigbatch.comm.algorithms.by_name import ALGORITHMS, AUTO, AllReduce, choose_algorithm, make_allreduce
from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.base import Backend, InFlight, dtype_name, require_type, size_of
from bigbatch.comm.lifetime import Connection
from bigbatch.comm.operation_order import OperationOrder
from bigbatch.comm.rendezvous.control import Control, OperationFacts
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.topology import Topology
from bigbatch.comm.timeline import Timeline
from bigbatch.errors import CRASHED, exit_code_of
from bigbatch.words import count

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from bigbatch.comm.algorithms.hybrid import HybridTable
    from bigbatch.comm.backends.host_staging import HostStaging
    from bigbatch.comm.backends.node_memory import NodeMemory
    from bigbatch.comm.backends.registered_memory import RegisteredMemory
    from bigbatch.comm.rendezvous.regroup import Endpoints
    from bigbatch.comm.rendezvous.watch import Watch

Collective = Callable[[Tensor], None]
"""Works on a flat tensor in place, together with the other ranks."""


@dataclass(frozen=True)
class Communicator:
    """Transport, topology and algorithm by which this rank sums tensors over all ranks."""

    env: ProcessEnv
    control: Control
    backend: Backend
    topology: Topology
    memory: "NodeMemory | None"
    """Memory that the ranks of a node share, if the backend reads host tensors; else None."""
    staging: "HostStaging | None"
    """Host copies of GPU tensors, if the backend reads only host tensors; else None."""
    algorithm: str
    all_reduce_: AllReduce
    wire: Wire
    table: "HybridTable | None"
    device: torch.device
    """Device of the tensors to sum."""
    timeline: Timeline
    watch: "Watch | None" = None
    registered: "RegisteredMemory | None" = None
    """Memory of allocate() that NCCL sums without copies; else None."""
    buffers: str = "torch"
    """Argument of connect(); measured times are valid only for it."""
    why: str = ""
    """Why the algorithm was chosen, if the config names none."""
    order: OperationOrder = field(default_factory=OperationOrder)
    """Order of this connection's operations, also of those through with_algorithm()."""
    endpoints: "Endpoints | None" = None
    """Where the ranks can form a new group after a rank is lost; None if they cannot."""

    @property
    def rank(self) -> int:
        return self.env.rank

    @property
    def world_size(self) -> int:
        return self.env.world_size

    @property
    def connection(self) -> Connection:
        return Connection(
            self.env, self.control, self.backend, self.topology, self.watch, self.registered, self.endpoints
        )

    @property
    def transport_device(self) -> torch.device:
        """Return the device from which the backend reads tensors: the CPU if GPU tensors are staged."""
        return self.device if self.staging is None else torch.device("cpu")

    @property
    def is_timed_by_host(self) -> bool:
        """Return whether a host thread waits for each operation, so that the host's clock times it."""
        return self.staging is not None or self.backend.name in ("mpi", "horovod")

    @property
    def algorithms(self) -> tuple[str, ...]:
        """List the algorithms that this backend can run, except hybrid, which needs a table."""
        if not self.backend.capabilities.has_messages:
            return ("native",)
        return tuple(name for name in ALGORITHMS if name != "hybrid")

    def with_algorithm(
        self,
        algorithm: str,
        *,
        wire: Wire | None = None,
        table: "HybridTable | None" = None,
        table_from: str = "a table",
    ) -> "Communicator":
        """Return a communicator of the same ranks with another all-reduce or wire precision. Collective.

        auto is replaced by the algorithm that it chooses; table_from: origin of the table, for messages.
        Raises: ValueError if the algorithm cannot run here.
        """
        wire, table, why = wire or self.wire, table or self.table, ""
        if algorithm == AUTO:
            algorithm, why = choose_algorithm(self.backend, table=table, table_from=table_from)
        _require_runnable(self, algorithm, wire=wire, table=table)
        self.agree("the all-reduce", f"{algorithm}\n{wire}\n{table}\n{self.topology.groups}")
        return _connect_algorithm(self, algorithm, wire=wire, table=table, why=why)

    def with_every_algorithm(self, *, but: Collection[str] = ()) -> "dict[str, Communicator]":
        """Return a communicator per algorithm that runs here; ranks compare all choices at once. Collective."""
        names = [name for name in self.algorithms if name not in but]
        self.agree("the all-reduces", f"{names}\n{self.wire}\n{self.topology.groups}")
        return {name: _connect_algorithm(self, name, wire=self.wire, table=self.table, why="") for name in names}

    def _watched(self, label: str) -> AbstractContextManager[None]:
        """Watch an NCCL call that has no time limit and bypasses the queue. All ranks make them in the same order."""
        return nullcontext() if self.watch is None else self.watch.during(label)

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Make a flat tensor of zeros that can be summed without copies. Collective."""
        return self.allocate_all([(num_elements, dtype)])[0]

    def allocate_all(self, sizes: Sequence[tuple[int, torch.dtype]]) -> list[Tensor]:
        """Make several tensors as allocate() does, from (num_elements, dtype), in the time of one. Collective."""
        if self.registered is not None:
            with self._watched("registration of buffers"):
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

    def start(self, tensor_N: Tensor, *, label: str) -> InFlight:
        """Start summing a flat tensor over all ranks, in place. Collective.

        A host tensor that is not from allocate() is copied to shared memory and back.
        Raises: TypeError if it is not a tensor; ValueError for a tensor on another device, not flat, or of a dtype that
        the backend cannot sum.
        """
        require_type(tensor_N, Tensor, what="tensor", legal="a torch.Tensor, such as torch.tensor(1.0)")
        return self.start_collective(
            self.all_reduce_, tensor_N, label=label, algorithm=self.algorithm_for(tensor_N), wire=self.wire
        )

    def start_collective(
        self, collective_: Collective, tensor_N: Tensor, *, label: str, algorithm: str, wire: Wire
    ) -> InFlight:
        """Start a collective other than the all-reduce on a flat tensor, in place, over all ranks.

        It uses the queue, copies and errors of start(). algorithm and wire name it in a trace.
        """
        _require_summable(self, tensor_N)
        if self.memory is not None and tensor_N.numel():
            operation = self.memory.operation(collective_, tensor_N, self.staging, finish=self._finish_all, label=label)
        else:
            operation = partial(collective_, tensor_N) if tensor_N.numel() else lambda: None
        if self.timeline.is_active:
            self.timeline.mark(label, row="buffers ready")
            facts = {"algorithm": algorithm, "bytes": tensor_N.nbytes, "wire": dtype_name(wire.of(tensor_N))}
            operation = self._recorded(operation, label, facts)
        self.control.detector.begin()
        work = self.submit(operation, label=label, size=size_of(tensor_N))
        return work if self.staging is None else InFlight(work.wait, self.staging.join)

    def _recorded(self, operation: Callable[[], None], label: str, facts: dict[str, Any]) -> Callable[[], None]:
        def recorded() -> None:
            with self.timeline.span(label, row="all-reduce", on_host=self.is_timed_by_host, **facts):
                operation()

        return recorded

    def submit(self, operation: Callable[[], None], **facts: "Unpack[OperationFacts]") -> InFlight:
        """Start an operation of the backend, after the sums that a GradientReducer holds; see Backend.submit()."""
        self.order.start_held()
        if facts.get("ranks") is None:
            self.order.note(facts["label"], facts.get("size"))
        return self.backend.submit(operation, **facts)

    def _finish_all(self) -> None:
        """Wait until all ranks have ended the operations so far."""
        # with a message, by which a rank notices another one that does not call this
        one_1 = torch.zeros(1)
        self.submit(lambda: self.backend.all_reduce_(one_1, self.backend.world), label="growth of shared memory").wait()

    def algorithm_for(self, tensor_N: Tensor) -> str:
        """Return the algorithm that sums this tensor: for hybrid, the table's choice by size."""
        return self.table.choose(tensor_N.nbytes) if self.table and self.algorithm == "hybrid" else self.algorithm

    def sum_(self, tensor_N: Tensor, *, label: str) -> Tensor:
        """Sum a flat tensor, or a scalar one, over all ranks, in place, and wait for it. Collective."""
        is_scalar = isinstance(tensor_N, Tensor) and tensor_N.dim() == 0
        self.start(tensor_N.detach().view(1) if is_scalar else tensor_N, label=label).wait()
        return tensor_N

    def gather(self, value: Any) -> list[Any]:
        """Gather a JSON value of every rank, in rank order; tuples become lists. Collective."""
        self.order.start_held()  # other ranks may wait in a sum that they started during backward
        return self.control.gather(value)

    def gather_text(self, text: str) -> list[str]:
        """Gather a short text of every rank, in rank order. Collective."""
        self.order.start_held()
        return self.control.gather_text(text)

    def agree(self, what: str, text: str) -> None:
        """Check that all ranks have the same text. Collective. Raises: CommError naming a rank that differs."""
        self.order.start_held()
        self.control.agree(what, text)

    def close(self) -> None:
        """Close the connection after a successful run. Collective. The last connection to close finalizes MPI.

        If other ranks still wait for this one in a sum, their waits end, and this rank fails with them. After an error
        that named a lost rank it skips the last barrier, which no rank would reach.
        """
        self.connection.close()

    def abort(self, exit_code: int = CRASHED) -> None:
        """Tell the other ranks that this rank fails: their waits end and name it. Takes at most a few seconds.

        exit_code: the coming exit code of this process. Running operations of this rank end with the process.
        """
        self.connection.abort(exit_code)

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.abort(exit_code_of(error))

    def __str__(self) -> str:
        started = "" if self.env.started_by == "none" else f", started by {self.env.started_by}"
        return (
            f"{count(self.world_size, 'rank')} in {count(self.topology.num_nodes, 'node group')}{started}; backend "
            f"{self.backend.name}, all-reduce {self.algorithm}"
        )


def _require_runnable(communicator: Communicator, algorithm: str, *, wire: Wire, table: "HybridTable | None") -> None:
    """Raise ValueError if the backend does not support the algorithm or the wire dtype."""
    names = communicator.algorithms
    if wire.dtype is not None and wire.dtype not in communicator.backend.capabilities.dtypes:
        raise ValueError(
            f"{communicator.backend.name} cannot sum {dtype_name(wire.dtype)}: choose another wire_dtype, or another "
            "backend"
        )
    if algorithm in ALGORITHMS and algorithm not in (*names, "hybrid"):
        raise ValueError(
            f"algorithm {algorithm!r} needs point-to-point messages, which {communicator.backend.name} does not have: "
            f"use {' or '.join(names)}, or another backend"
        )
    strange = [name for name in table.algorithms if name not in names] if table else []
    if algorithm == "hybrid" and strange:
        raise ValueError(
            f"the table of algorithm 'hybrid' uses {', '.join(strange)}, but {communicator.backend.name} has "
            f"{', '.join(names)} only: measure a table here with bigbatch comm tune, or use another backend"
        )


def _require_summable(communicator: Communicator, tensor_N: Tensor) -> None:
    """Raise ValueError if the backend cannot sum a tensor of this device, dtype or shape."""
    if tensor_N.device != communicator.device:
        raise ValueError(f"a tensor on {tensor_N.device} cannot be summed: ranks communicate on {communicator.device}")
    if tensor_N.dtype not in communicator.backend.capabilities.dtypes:
        names = ", ".join(map(dtype_name, communicator.backend.capabilities.dtypes))
        raise ValueError(f"{communicator.backend.name} cannot sum {tensor_N.dtype}; it sums {names}")
    if tensor_N.dim() != 1 or not tensor_N.is_contiguous():
        raise ValueError(f"only a flat, contiguous tensor can be summed, not one of shape {tuple(tensor_N.shape)}")


def _connect_algorithm(
    communicator: Communicator, algorithm: str, *, wire: Wire, table: "HybridTable | None", why: str
) -> Communicator:
    with communicator._watched(f"connection of the groups of algorithm {algorithm}"):
        all_reduce_ = make_allreduce(
            algorithm,
            backend=communicator.backend,
            topology=communicator.topology,
            memory=communicator.memory,
            wire=wire,
            table=table,
        )
    return replace(communicator, algorithm=algorithm, wire=wire, table=table, all_reduce_=all_reduce_, why=why)
