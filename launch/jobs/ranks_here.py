"""Processes of a job on this host, as /proc shows them: a launcher's ranks, and what these left running."""

import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from signal import SIGKILL, SIGTERM, Signals

from bigbatch.comm.rendezvous.environ import STOPPED_VARIABLE
from bigbatch.comm.rendezvous.exit_record import read_record
from bigbatch.comm.rendezvous.launcher import LAUNCHER_VARIABLES
from bigbatch.errors import tell

LOOKS = 5
"""Looks after the end of the ranks in which these processes may end by themselves; one a second."""


def children(pid: int) -> list[int]:
    """Return a process's children; an empty list if the system does not list them."""
    found: list[int] = []
    with suppress(OSError):  # it may end meanwhile
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def ranks_of(launcher: int) -> list[int]:
    """Return the process ids of a launcher's ranks on this host: its first descendants with this Python and a rank."""
    found, pending = list[int](), [launcher]
    while pending:
        for child in children(pending.pop()):
            (found if _is_rank(child) else pending).append(child)
    return found


def _is_rank(pid: int) -> bool:
    with suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(os.fsencode(sys.executable) + b"\0"):
            names = {
                os.fsdecode(word.partition(b"=")[0]) for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            }
            return not names.isdisjoint(rank for rank, *_ in LAUNCHER_VARIABLES.values())
    return False


def stop_signal(launcher: int, usual: Signals) -> Signals:
    """Return the signal by which a launcher asks its ranks to stop; SIGTERM if the usual one would end a rank.

    A rank that still imports torch has nothing to save. mpirun would report its end as a failure, and after SIGTERM
    mpirun ends its ranks silently.
    """
    return SIGTERM if _would_end(launcher, usual) or ends_a_rank(launcher, usual) else usual


def ends_a_rank(launcher: int, number: Signals) -> bool:
    """Return whether a rank of this launcher on this host would end by the signal; False once they have ended."""
    return any(_would_end(pid, number) for pid in ranks_of(launcher))


def _would_end(pid: int, number: Signals) -> bool:
    """Return whether a process neither handles nor ignores the signal."""
    with suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text()
        masks = [int(mask, 16) for mask in re.findall(r"^Sig(?:Blk|Ign|Cgt):\s*(\w+)$", status, re.M)]
        return not any(mask >> (number - 1) & 1 for mask in masks)
    return False


class LeftBehind:
    """Lets mpirun end, which waits for the output of processes that the ranks left behind, if all ranks are here."""

    def __init__(self, record: Path, *, num_ranks: int) -> None:
        """record: the file of the first rank's exit code, which the variables of this job's processes name."""
        self._record, self._num_ranks, self._num_here, self._num_looks = record, num_ranks, 0, 0

    def look(self, mpirun: int) -> bool:
        """Return whether mpirun can be ended, because the ranks have ended and their exit code is known.

        If only mpirun knows the code, this ends the processes that it waits for. Called once a second.
        """
        self._num_here = max(self._num_here, len(ranks_of(mpirun)))
        self._num_looks = 0 if children(mpirun) else self._num_looks + 1
        if self._num_looks <= LOOKS:
            return False
        left, is_known = self._processes(), isinstance(read_record(self._record), int)
        if is_known or not left:  # those left may have other variables, as after sudo or env -i
            return is_known and (bool(left) or self._num_here >= self._num_ranks)
        is_first = self._num_looks == LOOKS + 1
        if is_first:
            tell(f"all ranks have ended; ending what they left running: process {', '.join(map(str, left))}")
        for pid in left:
            with suppress(OSError):
                os.kill(pid, SIGTERM if is_first else SIGKILL)
        return False

    def _processes(self) -> list[int]:
        """Return the processes on this host that have a rank's variables of this job, if it has no other hosts."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                environ = dict(word.partition("=")[::2] for word in os.fsdecode(path.read_bytes()).split("\0"))
                size = environ.get("OMPI_COMM_WORLD_SIZE")
                is_here = size is not None and size == environ.get("OMPI_COMM_WORLD_LOCAL_SIZE")
                if is_here and environ.get(STOPPED_VARIABLE) == str(self._record):
                    found.append(int(path.parent.name))
        return found
