"""A job of a trial: its ranks as forked processes, here or in emulated nodes; what they say and when they end."""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from bigbatch.comm.rendezvous.environ import SECRET_VARIABLE
from bigbatch.comm.rendezvous.ports import FIRST_JOB_PORT
from bigbatch.comm.rendezvous.secret import new_secret
from bigbatch.files import write_whole
from bigbatch.tools.emulate.plan import address
from bigbatch.tools.emulate.state import EmulatedCluster
from faults import rank as rank_side
from faults.rank import GO, PAUSE_SECONDS, STEPPING, STRUCK, Place
from faults.trial import KINDS, Trial

LOOK_SECONDS = 0.02
BIRTH_SECONDS = 120.0
"""For the first process of all, which imports torch."""
HANG_SECONDS = 80.0
"""After a fault; a job that lives longer hangs. Its own time limit is a fraction of it."""
NEVER_SECONDS = 400.0
"""From the start; a training takes a few seconds, and many at once on a busy machine far more."""


def prepare() -> ForkServerContext:
    """Return what forks processes that have imported torch; it starts with the first one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(rank_side.PRELOAD))
    return context


def ask(context: ForkServerContext, function: Callable[..., str], *arguments: Any) -> str:
    """Call a function of rank.py in a forked process; return its result. Raises: EOFError if it failed."""
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=rank_side.answer, args=(function, arguments, there), daemon=True)
    process.start()
    there.close()
    try:
        with here:
            return str(here.recv())
    finally:
        process.join()
        process.close()


@dataclass
class Rank:
    """One rank, as the campaign sees it."""

    process: BaseProcess
    pid: int
    output: Path
    said: list[tuple[float, str]] = field(default_factory=list)
    """Its lines, and when each was there (time.monotonic())."""
    ended: float | None = None
    _size: int = 0

    def look(self, now: float) -> None:
        """Read its new output, and whether it has ended."""
        is_over = self.process.exitcode is not None
        data = self.output.read_bytes()[self._size :] if self.output.exists() else b""
        whole = data if is_over else data[: data.rfind(b"\n") + 1]
        self._size += len(whole)
        self.said += [(now, line) for line in whole.decode(errors="replace").splitlines()]
        if is_over and self.ended is None:
            self.ended = now

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it is still there."""
        if self.process.exitcode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


class Job:
    """Starts the ranks of a training, with a fault or without, follows them, and ends what does not end."""

    def __init__(
        self,
        context: ForkServerContext,
        command: tuple[str, ...],
        *,
        shape: Trial,
        fault: Trial | None,
        folder: Path,
        cluster: EmulatedCluster | None,
    ) -> None:
        """shape: how many ranks there are, and where; folder: of the trial."""
        self.fault, self.port = fault, FIRST_JOB_PORT if cluster else _free_port()
        self.folder = folder / ("again" if fault is None else "struck")
        (self.folder / "tmp").mkdir(parents=True)
        self.started = time.monotonic()
        self._secret = new_secret()
        self.ranks = [_start(context, command, fault, self._place(shape, rank, cluster)) for rank in range(shape.ranks)]
        self.is_hung = False

    def _place(self, shape: Trial, rank: int, cluster: EmulatedCluster | None) -> Place:
        node, local_rank = divmod(rank, shape.ranks_per_node)
        variables: Mapping[str, object] = {
            "RANK": rank,
            "WORLD_SIZE": shape.ranks,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": shape.ranks_per_node,
            "GROUP_RANK": node,
            "MASTER_ADDR": address(0) if cluster else "127.0.0.1",
            "MASTER_PORT": self.port,
            SECRET_VARIABLE: self._secret,
            "TMPDIR": self.folder / "tmp",
        }
        texts = {name: str(value) for name, value in variables.items()}
        return Place(texts, self.folder, cluster.keeper if cluster else None, node)

    def follow(self, on_struck: Callable[["Job"], Callable[["Job"], None] | None] = lambda job: None) -> None:
        """Wait until all have ended. on_struck acts when the fault strikes; what it returns, PAUSE_SECONDS later.

        A rank that the fault has stopped for good is killed when the others have ended, as launchers do.
        """
        acted, later, deadline = False, None, time.monotonic() + NEVER_SECONDS
        try:
            while not self.has_ended:
                time.sleep(LOOK_SECONDS)
                now = time.monotonic()
                for rank in self.ranks:
                    rank.look(now)
                if not acted and (self.folder / STRUCK).exists():
                    acted, deadline = True, now + HANG_SECONDS
                    later = on_struck(self)
                    write_whole(self.folder / GO, b"")
                if later is not None and now > self.struck[0] + PAUSE_SECONDS:
                    later(self)
                    later = None
                if now > deadline:
                    self.is_hung = True
                    self.end()
                elif acted and self.is_for_the_launcher and all(rank.ended for rank in self.survivors):
                    self.end()
        finally:
            self.end()

    def end(self) -> None:
        """Kill what still lives, and wait until it is gone."""
        self.kill()
        for rank in self.ranks:
            rank.process.join()

    def kill(self) -> None:
        """Kill what still lives."""
        for rank in self.ranks:
            rank.send(signal.SIGKILL)

    @property
    def has_ended(self) -> bool:
        """Return whether all of its ranks have."""
        return all(rank.ended is not None for rank in self.ranks)

    @property
    def is_for_the_launcher(self) -> bool:
        """Return whether the rank that was struck can end in no other way than by its launcher."""
        return self.fault is not None and KINDS[self.fault.kind].never_ends

    @property
    def survivors(self) -> list[Rank]:
        """Return the ranks that the fault leaves alone."""
        struck = self.fault.struck if self.fault else frozenset()
        return [rank for number, rank in enumerate(self.ranks) if number not in struck]

    @property
    def struck(self) -> tuple[float, int]:
        """Return when the fault struck, and how many steps were done. Raises: FileNotFoundError where it has not."""
        return _read_mark(self.folder / STRUCK)

    @property
    def stepping(self) -> tuple[float, int] | None:
        """Return when the first step began, and how many were done before; None where there was none."""
        return _read_mark(self.folder / STEPPING) if (self.folder / STEPPING).exists() else None

    @property
    def exit_codes(self) -> list[int | None]:
        """Return that of each rank, or minus the number of the signal that ended it."""
        return [rank.process.exitcode for rank in self.ranks]

    def text(self) -> str:
        """Return all that was said, rank by rank."""
        return "\n".join(f"[{number}] {line}" for number, rank in enumerate(self.ranks) for _, line in rank.said)

    def left_processes(self) -> list[int]:
        """Return the processes of the ranks' sessions that live."""
        sessions = {rank.pid for rank in self.ranks}
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError):
                fields = path.read_text().rpartition(")")[2].split()
                if int(fields[3]) in sessions and fields[0] not in "ZX":
                    found.append(int(path.parent.name))
        return found

    def is_listening(self) -> bool:
        """Return whether the port of this machine at which the ranks met is still taken."""
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", self.port))
            except OSError:
                return True
        return False


def _start(context: ForkServerContext, command: tuple[str, ...], fault: Trial | None, place: Place) -> Rank:
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=rank_side.live, args=(place, command, fault, there), daemon=True)
    process.start()
    there.close()
    return Rank(process, _born(here), place.folder / f"{place.rank}.log")


def _born(here: Connection) -> int:
    with here:
        if not here.poll(BIRTH_SECONDS):
            raise TimeoutError(f"a rank did not start within {BIRTH_SECONDS:g} s")
        return int(here.recv())


def _read_mark(path: Path) -> tuple[float, int]:
    seconds, done = path.read_text().split()
    return float(seconds), int(done)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
