"""Run a launcher in the foreground: its output, its exit code, and Ctrl-C as a checkpoint."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any, TypeAlias

from bigbatch.errors import INTERRUPTED, LaunchOptionError, pip_install, tell
from bigbatch.launch.jobs.ranks_here import ends_a_rank, ranks_of, stop_signal
from bigbatch.orphans import ending_orphans
from bigbatch.trainer.step.signals import handling_stops

Process: TypeAlias = "subprocess.Popen[bytes]"
LOOK_SECONDS = 1.0
"""Period of the check whether a launcher's ranks have ended without it."""
MISSING = {
    "mpirun": f"{pip_install('mpi')}, or use torchrun",
    "flux": "log in to a host with Flux, or use bigbatch launch mpirun",
}
"""Program -> what to do if it is not installed."""
SIGNALLED = 128
"""A shell's code of a process that a signal ended is this plus the signal's number."""
END_SECONDS = 1.0
"""Time for a launcher without ranks to end after SIGTERM."""
MORE_HOSTS_SECONDS = 60.0
"""Period of the check whether more hosts are available for a job."""


class Stopper:
    """Signal handler that asks a job's processes to stop, escalating: asks_to_stop, then SIGTERM, then SIGKILL."""

    def __init__(self, running: Callable[[], Iterable[Process]], asks_to_stop: signal.Signals) -> None:
        """running: returns the processes of the job that run here; these are ranks, or launchers of ranks."""
        self._running, self._steps = running, (asks_to_stop, signal.SIGTERM, signal.SIGKILL)
        self.asked = 0
        self._had_ranks = False
        self.sent: set[signal.Signals] = set()
        """The signals that processes got, perhaps before they could handle them."""

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Print a line the first time; the last step repeats."""
        self.asked += 1
        if self.asked == 1:
            with suppress(OSError, RuntimeError):  # the terminal may be gone, and print is not reentrant
                print("\nbigbatch: asking all ranks to save a checkpoint and stop", file=sys.stderr, flush=True)
        self.send(self._steps[min(self.asked, len(self._steps)) - 1])

    def send(self, step: signal.Signals) -> None:
        """Send the signal, or SIGTERM to a launcher whose ranks it would end; also ends processes that are stopped."""
        for process in tuple(self._running()):
            self._had_ranks = self._had_ranks or bool(ranks_of(process.pid))
            number = stop_signal(process.pid, step) if step == self._steps[0] else step
            if number == signal.SIGTERM and number in self.sent and number != self._steps[0]:
                continue  # mpirun, which prints a text at the second one, is ending
            self.sent.add(number)
            process.send_signal(number)
            if number == signal.SIGTERM:
                process.send_signal(signal.SIGCONT)

    def repeat_if_lost(self) -> None:
        """Ask again after a first request that came before a launcher's ranks had started, so that none got it."""
        usual, running = self._steps[0], tuple(self._running())
        # not if ranks were there: those that end, and a launcher that ends, do not handle the signal any more
        if self.asked == 1 and not self._had_ranks and any(ends_a_rank(each.pid, usual) for each in running):
            self.send(usual)

    @property
    def was_terminated(self) -> bool:
        """Return whether a request to stop sent SIGTERM, which leaves mpirun's ranks no time to save."""
        return self.asked > 0 and signal.SIGTERM in self.sent

    def code_of(self, returncode: int) -> int:
        """Return a process's exit code as a shell states it, or INTERRUPTED if this handler's signal ended it."""
        code = shell_code(returncode)
        return INTERRUPTED if self.asked and code - SIGNALLED in self.sent else code


def shell_code(returncode: int) -> int:
    """Return a process's exit code as a shell states it: 128 + signal if a signal ended it."""
    # subprocess returns a signal as a negative number
    return returncode if returncode >= 0 else SIGNALLED - returncode


def one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


@dataclass(frozen=True)
class Ended:
    """How a launcher ended."""

    code: int
    """Its exit code; 128 + signal if a signal ended it."""
    was_asked: bool
    """Whether a signal asked this process to stop; mpirun's code does not show it (1 after a second Ctrl-C)."""
    was_terminated: bool = False
    """Whether SIGTERM followed, which leaves mpirun's ranks no time to save: mpirun then ends with 1."""
    for_restart: bool = False
    """Whether the job was stopped in order to restart on more hosts."""
    outlived_rank_0: bool = False
    """Whether the launcher still ran some time after rank 0 had ended, and was ended."""


def run_in_foreground(
    argv: list[str],
    *,
    environ: Mapping[str, str],
    asks_to_stop: signal.Signals,
    should_restart: Callable[[], bool] | None = None,
    rank_0_ended: Callable[[int], bool] | None = None,
    watch: Callable[[int], object] | None = None,
) -> Ended:
    """Start argv and wait for its end. should_restart: called every MORE_HOSTS_SECONDS; if true, the job is stopped.

    rank_0_ended: called every LOOK_SECONDS with the launcher's process id; if true, rank 0 ended some time ago, and the
    launcher is ended: it might otherwise wait a quarter of an hour for a lost host.

    The job runs in a new session, so Ctrl-C reaches only this process. The first Ctrl-C sends asks_to_stop to the
    launcher, which passes it on (the ranks save a checkpoint and stop), the second SIGTERM, the third SIGKILL. If this
    process is killed, the launcher gets asks_to_stop. Under nohup a closed terminal changes nothing. watch: function
    of an ending_orphans that the caller entered before it created files for the job; None: one is entered here.
    Raises: LaunchOptionError when the launcher is not installed.
    """
    started: list[Process] = []
    stopper = Stopper(lambda: started, asks_to_stop)
    for_restart = outlived = False
    with handling_stops(stopper), nullcontext(watch) if watch else ending_orphans(asks_to_stop) as watching:
        process = start_process(argv, environ=environ)
        watching(process.pid)
        started.append(process)
        # repeat earlier requests, which had no receiver; twice does no harm this early
        if stopper.asked:
            stopper.send(asks_to_stop)
        asked_at = monotonic()
        while True:
            pauses = [MORE_HOSTS_SECONDS] * (should_restart is not None) + [LOOK_SECONDS] * (rank_0_ended is not None)
            try:
                code = process.wait(timeout=min(pauses, default=None))
                break
            except subprocess.TimeoutExpired:
                stopper.repeat_if_lost()
                if rank_0_ended is not None and rank_0_ended(process.pid):
                    outlived = True
                    code = _end(process, argv[0])
                    break
                if should_restart is not None and monotonic() - asked_at >= MORE_HOSTS_SECONDS:
                    for_restart, asked_at = should_restart(), monotonic()
                    if for_restart:
                        should_restart = None  # once is enough
                        if not stopper.asked:
                            stopper.send(asks_to_stop)
    return Ended(
        stopper.code_of(code),
        was_asked=stopper.asked > 0,
        was_terminated=stopper.was_terminated,
        for_restart=for_restart,
        outlived_rank_0=outlived,
    )


def start_process(argv: Sequence[str], *, environ: Mapping[str, str], **others: Any) -> Process:
    """Start a process in a new session, without input: a job would consume the rest of a loop's list, or of a script.

    others: of Popen. Raises: LaunchOptionError if its program is not installed.
    """
    try:
        return subprocess.Popen(argv, env=dict(environ), stdin=subprocess.DEVNULL, start_new_session=True, **others)
    except FileNotFoundError as error:
        remedy = MISSING.get(Path(argv[0]).name, "install it, or use another launcher")
        raise LaunchOptionError(f"{argv[0]} is not installed here: {remedy}") from error


def _end(process: Process, name: str) -> int:
    """End a launcher whose ranks have ended; return its code."""
    tell(f"{Path(name).name} still runs although the job's first rank has ended: ending it")
    process.terminate()
    return wait_or_kill(process, seconds=END_SECONDS)


def wait_or_kill(process: Process, *, seconds: float) -> int:
    """Return the code of a process of start_process; after these seconds, kill it and its children, such as ssh."""
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.wait()
