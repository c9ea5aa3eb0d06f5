"""A connection of this process with the other ranks: their texts, and its end.

A connection is closed or aborted after a run, after an error, or when the interpreter ends.
"""

import atexit
import os
import sys
import threading
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from bigbatch.comm.backends.base import Backend
from bigbatch.comm.operation_order import OperationOrder
from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.launcher import MPI_LAUNCHERS
from bigbatch.comm.rendezvous.topology import Topology
from bigbatch.errors import CRASHED, FAILED, INTERRUPTED, LOST, CommError, PeerLostError, first_line, tell
from bigbatch.parts import load

if TYPE_CHECKING:
    from bigbatch.comm.rendezvous.regroup import Endpoints
    from bigbatch.comm.rendezvous.watch import Watch

LAST_SECONDS = 3.0
"""After a failure, an ending process waits this long for operations that still run."""
open_connections: dict[Control, "Connection"] = {}
"""Connections that this process has not closed."""
_aborted: list[Backend] = []
"""Backends aborted after a failure: one of their threads may still wait for a lost rank."""
_closed_over_mpi: list[int] = []
"""Identifier of this process for each such connection: a forked process must not end MPI."""


@dataclass(frozen=True)
class Connection:
    """A job as one of its ranks sees it: rank, other ranks and texts, until it is closed, aborted or abandoned."""

    env: ProcessEnv
    control: Control
    backend: Backend
    topology: Topology
    watch: "Watch | None" = None
    endpoints: "Endpoints | None" = None
    """Where the ranks can form a new group after a rank is lost; None if they cannot."""
    pid: int = field(default_factory=os.getpid)
    """Only this process ends the connection; one forked from it inherits the functions registered for its exit."""

    @cached_property
    def order(self) -> OperationOrder:
        """Order of all operations of the connection, by any algorithm."""
        return OperationOrder(self.control.agree if self.backend.name == "nccl" else None)

    @property
    def rank(self) -> int:
        return self.env.rank

    @property
    def world_size(self) -> int:
        return self.env.world_size

    def gather(self, value: Any) -> list[Any]:
        """Gather a JSON value of every rank, in rank order; tuples become lists. Collective."""
        self.order.start_held()  # other ranks may wait in a sum that they started during backward
        return self.control.gather(value)

    def agree(self, what: str, text: str) -> None:
        """Check that all ranks have the same text. Collective. Raises: CommError naming a rank that differs."""
        self.order.start_held()
        self.control.agree(what, text)

    def watched(self, label: str) -> AbstractContextManager[None]:
        """Watch an NCCL call that has no time limit and bypasses the queue. All ranks make them in the same order."""
        return nullcontext() if self.watch is None else self.watch.during(label)

    def close(self) -> None:
        """Close the connection after a successful run. Collective. The last connection to close finalizes MPI.

        If other ranks still wait for this one in a sum, their waits end, and this rank fails with them. After an error
        that named a lost rank it skips the last barrier, which no rank would reach.
        """
        detector = self.control.detector
        if detector.has_failed or self.pid != os.getpid():
            self.abort()
            return
        with suppress(RuntimeError):  # if the store is lost, the last barrier reports it
            detector.publish_departure()
        self.backend.close()
        # closed last: only the watch can end a wait in NCCL's last barrier
        self._unregister()
        detector.publish_success(within_seconds=self.control.timeout_seconds)
        uses_mpi = self.backend.name in ("mpi", "horovod") or self.env.master is None
        if self.env.launcher in MPI_LAUNCHERS and self.world_size > 1 and uses_mpi:
            _closed_over_mpi.append(self.pid)

    def abort(self, exit_code: int = CRASHED) -> None:
        """Tell the other ranks that this rank fails: their waits end and name it. Takes at most a few seconds.

        exit_code: the coming exit code of this process. Running operations of this rank end with the process.
        """
        if self.pid != os.getpid():
            return
        _aborted.append(self.backend)
        self._unregister()  # a watch would still answer when the others ask which ranks are alive
        with suppress(RuntimeError):  # if the store is lost, the others have noticed already
            self.control.detector.publish_crash(exit_code)

    def abandon(self) -> None:
        """Release a connection that is not used, such as one whose algorithm was refused. All ranks call it."""
        self._unregister()
        self.backend.abandon()

    def _unregister(self) -> None:
        open_connections.pop(self.control, None)
        if self.watch is not None:
            self.watch.close()


def close_at_exit(connection: Connection) -> None:
    """Register a connection to be closed when the interpreter ends, unless it is closed before."""
    if not open_connections:
        for function in (end_mpi, _close_all):  # the interpreter calls the last one first
            atexit.unregister(function)  # registering it once is enough
            atexit.register(function)
    open_connections[connection.control] = connection


def abort_connection(control: Control) -> None:
    """After a rank is lost, abort the operations of its connection, if one is open, and release it.

    NCCL's abort may fail, or hang (nccl issue 1013): at once, or after the control's timeout_seconds, this process ends
    as a lost rank does.
    """
    if connection := open_connections.get(control):
        connection._unregister()
        within = f"within {control.timeout_seconds:g} s"
        limit = threading.Timer(control.timeout_seconds, _end_as_lost, (connection, within))
        limit.daemon = True
        limit.start()
        try:
            connection.backend.abort()  # type: ignore[attr-defined]  # only backends in HEALING
        except CommError as error:
            _end_as_lost(connection, f"({first_line(error)})")
        finally:
            limit.cancel()


def _end_as_lost(connection: Connection, why: str) -> None:
    tell(
        f"rank {connection.rank} on {connection.env.host}: {connection.backend.name} did not abort its operations "
        f"{why}: this process ends as a lost rank"
    )
    os._exit(LOST)  # the main thread may hang in the library


def abort_all(exit_code: int) -> None:
    """Tell the other ranks over every open connection that this rank ends with exit_code."""
    for connection in list(open_connections.values()):
        connection.abort(exit_code)


def end_mpi() -> None:
    """End MPI as the process ends, if all connections over MPI ended well: a script may use MPI after close()."""
    # to mpirun a rank that ends without MPI_Finalize has failed; MPI cannot be initialized twice
    if os.getpid() in _closed_over_mpi and not (open_connections or _aborted or getattr(sys, "last_value", None)):
        load("bigbatch.comm.backends.mpi.finalize_mpi")()


def _close_all() -> None:
    """Close all connections, the newest first; abort them after an uncaught exception.

    If a rank was lost before, this process fails, too. It also fails if an operation or a store request still runs
    after LAST_SECONDS: a thread that returns from C++ into an ending interpreter would abort the process.
    """
    uncaught = getattr(sys, "last_value", None)
    has_lost = False
    for connection in reversed(list(open_connections.values())):
        detector = connection.control.detector
        has_failed = detector.has_failed
        try:
            connection.abort() if uncaught is not None else connection.close()
            if has_failed and detector.verdict and uncaught is None:
                raise PeerLostError(detector.verdict.reason)
        except CommError as error:
            tell(*error.args)
            has_lost = True
    if has_lost or not _have_ended():
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        # the interpreter accepts no other exit code while it ends
        os._exit(INTERRUPTED if isinstance(uncaught, KeyboardInterrupt) else FAILED)


def _have_ended() -> bool:
    """Return whether no operation and no store request runs any more, at most LAST_SECONDS later."""
    if not _aborted and threading.active_count() == 1:
        return True
    from bigbatch.comm.rendezvous.bounded_store import has_request_under_way, wait_until

    return wait_until(lambda: not (has_request_under_way() or any(each.oldest() for each in _aborted)), LAST_SECONDS)
