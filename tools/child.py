"""A training run or launcher as a child process: start it, ask it to stop, end it, find out why it failed."""

import os
import re
import subprocess
import time
from collections.abc import Sequence, Set
from contextlib import ExitStack, suppress
from pathlib import Path
from signal import SIGTERM

import psutil

from bigbatch.comm.rendezvous.environ import without_identity
from bigbatch.errors import LAUNCHER_LINE, printable
from bigbatch.files import make_folder, open_to_append, read_end
from bigbatch.orphans import ending_orphans
from bigbatch.trainer.folder.folder import writing

OUT_OF_MEMORY = re.compile(
    r"out of memory|not enough memory|can't allocate memory|OutOfMemory|MemoryError|oom.kill", re.I
)
KILLED = 137
TIME_IS_OVER = "DUE TO TIME LIMIT"
"""Part of Slurm's message before it ends a job at its time limit."""
DATED = re.compile(
    r"^bigbatch: (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (.*)|^slurmstepd\S*: .* AT (\d{4}-\d\d-\d\dT[\d:]+) ", re.A
)
"""Lines of a job's own script, and of Slurm when it ends a job."""


def find_reason(text: str, *, exit_code: int | None) -> str:
    """Return the reason from a job's output and exit code (None if only the scheduler knows it)."""
    lines = _lines(text)
    for line in lines:
        if OUT_OF_MEMORY.search(line):
            return f"out of memory: {_shorten(line.rpartition('out of memory: ')[2])}"
    if any(TIME_IS_OVER in line for line in lines):
        return "took longer than its time limit, and was ended"
    if exit_code == KILLED:
        return "killed, most likely by the kernel, out of memory"
    ours = [line.partition("bigbatch: ")[2] for line in lines if "bigbatch: " in line and not DATED.match(line)]
    if ours:
        causes = [line for line in ours if not LAUNCHER_LINE.search(line)]
        return _shorten((causes or ours)[-1])
    ended = "the job ended" if exit_code is None else f"exit code {exit_code}"
    return f"{ended}: {_shorten(lines[-1])}" if lines else f"{ended}, and printed nothing"


def has_failed(text: str) -> bool:
    """Return whether the last line of a job's script says that the job failed."""
    ends = [line for line in _lines(text) if DATED.match(line) and "ended with exit code" in line]
    return bool(ends) and not ends[-1].endswith(" 0")


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _shorten(line: str) -> str:
    return line if len(line) <= 300 else line[:297] + "..."


PATIENCE_SECONDS = (60.0, 15.0)
"""Waits after the first and the second request to stop. After the first a run saves a checkpoint, after the second
`bigbatch launch` ends its ranks; then the process is killed."""
END_SECONDS = 5.0
"""Wait of end() after its requests to stop; mpirun takes about one second to kill its ranks."""
LEAVE_SECONDS = 5.0
"""Time that a launcher's ranks may outlive it."""

UNENDABLE_SECONDS = 30.0
"""Limit of the wait after SIGKILL; a process that still lives waits for a device or a file system."""


class ChildProcess:
    """Runs a command in a new session, so that Ctrl-C reaches it only through the parent.

    If the parent is killed, the command is asked to stop.
    """

    def __init__(self, argv: Sequence[str], *, log: Path, within: Path) -> None:
        """Start it, with its output appended to log, whose folder is created below `within`. Raises: RunFolderError."""
        self._log = log
        self._started = time.monotonic()
        self._requests: list[float] = []
        self._sessions: set[int] = set()
        self._watched = ExitStack()
        with writing(log):
            make_folder(log.parent, within=within)
            with open_to_append(log) as output:
                # a resumed run appends: search only the new output for a reason
                self._output_start = output.tell()
                watch = self._watched.enter_context(ending_orphans(SIGTERM))
                self._process = subprocess.Popen(
                    argv,
                    env=without_identity(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                watch(self._process.pid)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def was_asked(self) -> bool:
        return bool(self._requests)

    def ask_to_stop(self) -> None:
        """Ask it to save a checkpoint and stop, by SIGTERM."""
        self._requests.append(time.monotonic())
        # before it ends: afterwards its ranks are no longer its descendants
        self._sessions |= sessions_under(self._process.pid)
        with suppress(ProcessLookupError):
            self._process.send_signal(SIGTERM)

    def exit_code(self) -> int | None:
        """Return its exit code as a shell states it, or None while it runs; escalates an earlier request to stop."""
        code = self._process.poll()
        if code is None and self._requests:
            first, second = PATIENCE_SECONDS
            waited = time.monotonic() - self._requests[-1]
            if len(self._requests) == 1 and waited > first:
                self.ask_to_stop()
            elif len(self._requests) > 1 and waited > second:
                self.kill()
        if code is not None:
            self._watched.close()
            if self._sessions:
                self._end_sessions()
        return code if code is None or code >= 0 else 128 - code

    def end(self) -> None:
        """End it without a checkpoint; `bigbatch launch` gets time to end its ranks."""
        while len(self._requests) < 2:
            self.ask_to_stop()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=END_SECONDS)
        self.kill()

    def kill(self) -> None:
        """Kill it and its descendants, also those in other process groups (Open MPI) and sessions (torchrun)."""
        self._sessions |= sessions_under(self._process.pid)
        self._process.kill()
        self._process.wait()
        self._watched.close()
        self._end_sessions()

    def _end_sessions(self) -> None:
        sessions, self._sessions = self._sessions, set()
        end_sessions(sessions, grace_seconds=LEAVE_SECONDS)

    def reason(self) -> str:
        """Return the reason of its failure in one line. Raises: RunFolderError."""
        with writing(self._log):
            text = read_end(self._log, start=self._output_start)
        return printable(find_reason(text, exit_code=self.exit_code()))


def sessions_under(pid: int) -> set[int]:
    """Return the sessions of this child and of all its descendants."""
    found = {pid}
    with suppress(psutil.NoSuchProcess):  # a signal handler may just have reaped it
        for each in psutil.Process(pid).children(recursive=True):
            with suppress(ProcessLookupError):
                found.add(os.getsid(each.pid))
    return found


def end_sessions(sessions: Set[int], *, grace_seconds: float) -> None:
    """Wait until no process is left in the sessions; after grace_seconds kill the rest."""
    start = time.monotonic()
    while left := processes_in(sessions):
        seconds = time.monotonic() - start
        # a process that waits for a device cannot be killed
        if seconds >= grace_seconds + UNENDABLE_SECONDS:
            return
        if seconds >= grace_seconds:
            for each in left:
                with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                    each.kill()
        time.sleep(0.05)


def processes_in(sessions: Set[int]) -> list[psutil.Process]:
    """Return the processes of these sessions, without zombies."""
    found = []
    for each in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            # the session first: it excludes most processes of a machine
            if os.getsid(each.pid) in sessions and each.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                found.append(each)
    return found
