"""The all-reduce over the ranks of a job: what connect() returns."""

from collections.abc import Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from bigbatch.comm.algorithms.by_name import ALGORITHMS, AUTO, AllReduce, SizeTable, choose_algorithm, make_allreduce
from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.base import InFlight, dtype_name
from bigbatch.comm.connection import Connection
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.transport import Transport
from bigbatch.errors import exit_code_of
from bigbatch.words import count


def make_communicator(
    transport: Transport,
    algorithm: str,
    *,
    wire: Wire = Wire(),  # noqa: B008
    table: SizeTable | None = None,
    table_from: str = "a table",
) -> "Communicator":
    """Return the all-reduce of this name over a transport. Collective.

    auto is replaced by the algorithm that it chooses; table_from: origin of the table, for messages.
    Raises: ValueError if the algorithm cannot run here.
    """
    why = ""
    if algorithm == AUTO:
        algorithm, why = choose_algorithm(transport.backend, table=table, table_from=table_from)
    _require_runnable(transport, algorithm, wire=wire, table=table)
    connection = transport.connection
    connection.agree("the all-reduce", f"{algorithm}\n{wire}\n{table}\n{connection.topology.groups}")
    return _connect(transport, algorithm, wire=wire, table=table, why=why)


@dataclass(frozen=True)
class Communicator:
    """Sums tensors over all ranks by one algorithm, over a transport that other communicators may share."""

    transport: Transport
    algorithm: str
    all_reduce_: AllReduce
    wire: Wire
    table: SizeTable | None = None
    why: str = ""
    """Why the algorithm was chosen, if the config names none."""

    @property
    def connection(self) -> Connection:
        return self.transport.connection

    @property
    def env(self) -> ProcessEnv:
        return self.connection.env

    @property
    def rank(self) -> int:
        return self.connection.rank

    @property
    def world_size(self) -> int:
        return self.connection.world_size

    @property
    def device(self) -> torch.device:
        """Device of the tensors to sum."""
        return self.transport.device

    def with_algorithm(
        self, algorithm: str, *, wire: Wire | None = None, table: SizeTable | None = None, table_from: str = "a table"
    ) -> "Communicator":
        """Return a communicator of the same ranks with another all-reduce or wire precision. Collective.

        Arguments and errors are those of make_communicator(); None stands for this communicator's.
        """
        wire, table = wire or self.wire, table or self.table
        return make_communicator(self.transport, algorithm, wire=wire, table=table, table_from=table_from)

    def with_every_algorithm(self, *, but: Collection[str] = ()) -> "dict[str, Communicator]":
        """Return a communicator per algorithm that runs here; ranks compare all choices at once. Collective."""
        names = [name for name in self.transport.algorithms if name not in but]
        self.agree("the all-reduces", f"{names}\n{self.wire}\n{self.connection.topology.groups}")
        return {name: _connect(self.transport, name, wire=self.wire, table=self.table) for name in names}

    def algorithm_for(self, tensor_N: Tensor) -> str:
        """Return the algorithm that sums this tensor: for hybrid, the table's choice by size."""
        return self.table.choose(tensor_N.nbytes) if self.table and self.algorithm == "hybrid" else self.algorithm

    def start(self, tensor_N: Tensor, *, label: str) -> InFlight:
        """Start summing a flat tensor over all ranks, in place. Collective. Raises: as Transport.start()."""
        # the table's choice is needed only for a trace
        algorithm = self.algorithm if self.transport.timeline is None else self.algorithm_for(tensor_N)
        return self.transport.start(self.all_reduce_, tensor_N, label=label, algorithm=algorithm, wire=self.wire)

    def sum_(self, tensor_N: Tensor, *, label: str) -> Tensor:
        """Sum a flat tensor, or a scalar one, over all ranks, in place, and wait for it. Collective."""
        is_scalar = isinstance(tensor_N, Tensor) and tensor_N.dim() == 0
        self.start(tensor_N.detach().view(1) if is_scalar else tensor_N, label=label).wait()
        return tensor_N

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Make a flat tensor of zeros that can be summed without copies. Collective."""
        return self.transport.allocate((num_elements, dtype))[0]

    def release(self, tensor_N: Tensor) -> None:
        """Free a tensor of allocate(), which must not be used afterwards. All ranks call it."""
        self.transport.release(tensor_N)

    def gather(self, value: Any) -> list[Any]:
        """Gather a JSON value of every rank, in rank order; tuples become lists. Collective."""
        return self.connection.gather(value)

    def agree(self, what: str, text: str) -> None:
        """Check that all ranks have the same text. Collective. Raises: CommError naming a rank that differs."""
        self.connection.agree(what, text)

    def close(self) -> None:
        """Close the connection, with all its communicators, after a successful run. Collective; see Connection."""
        self.connection.close()

    def __enter__(self) -> "Communicator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        else:
            self.connection.abort(exit_code_of(error))

    def __str__(self) -> str:
        started = "" if self.env.started_by == "none" else f", started by {self.env.started_by}"
        return (
            f"{count(self.world_size, 'rank')} in {count(self.connection.topology.num_nodes, 'node group')}{started}; "
            f"backend {self.transport.backend.name}, all-reduce {self.algorithm}"
        )


def _require_runnable(transport: Transport, algorithm: str, *, wire: Wire, table: SizeTable | None) -> None:
    """Raise ValueError if the backend does not support the algorithm or the wire dtype."""
    backend, names = transport.backend, transport.algorithms
    if wire.dtype is not None and wire.dtype not in backend.capabilities.dtypes:
        raise ValueError(
            f"{backend.name} cannot sum {dtype_name(wire.dtype)}: choose another wire_dtype, or another backend"
        )
    if algorithm in ALGORITHMS and algorithm not in (*names, "hybrid"):
        raise ValueError(
            f"algorithm {algorithm!r} needs point-to-point messages, which {backend.name} does not have: "
            f"use {' or '.join(names)}, or another backend"
        )
    strange = [name for name in table.algorithms if name not in names] if table else []
    if algorithm == "hybrid" and strange:
        raise ValueError(
            f"the table of algorithm 'hybrid' uses {', '.join(strange)}, but {backend.name} has "
            f"{', '.join(names)} only: measure a table here with bigbatch comm tune, or use another backend"
        )


def _connect(
    transport: Transport, algorithm: str, *, wire: Wire, table: SizeTable | None, why: str = ""
) -> Communicator:
    """Connect the groups of the algorithm. Collective."""
    connection = transport.connection
    with connection.watched(f"connection of the groups of algorithm {algorithm}"):
        all_reduce_ = make_allreduce(
            algorithm,
            backend=transport.backend,
            topology=connection.topology,
            memory=transport.memory,
            wire=wire,
            table=table,
        )
    return Communicator(transport, algorithm, all_reduce_, wire, table, why)
