"""Run a launcher in the foreground: its output, its exit code, and Ctrl-C as a checkpoint."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Any

from bigbatch.errors import LaunchOptionError, tell
from bigbatch.orphans import ending_orphans
from bigbatch.trainer.step.signals import handling_stops

LOOK_SECONDS = 1.0
"""Period of the check whether a launcher's ranks have ended without it."""
MISSING = {
    "mpirun": "pip install 'bigbatch[mpi]', or use torchrun",
    "flux": "log in to a host with Flux, or use bigbatch launch mpirun",
}
"""Program -> what to do if it is not installed."""
END_SECONDS = 1.0
"""Time for a launcher without ranks to end after SIGTERM."""
MORE_HOSTS_SECONDS = 60.0
"""Period of the check whether more hosts are available for a job."""


class Stopper:
    """Signal handler that asks a job to stop, escalating: each call sends the next of steps."""

    def __init__(self, send: Callable[[signal.Signals], None], *steps: signal.Signals) -> None:
        self._send, self._steps = send, steps
        self.asked = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Print a line the first time; the last step repeats."""
        self.asked += 1
        if self.asked == 1:
            with suppress(OSError, RuntimeError):  # the terminal may be gone, and print is not reentrant
                print("\nbigbatch: asking all ranks to save a checkpoint and stop", file=sys.stderr, flush=True)
        self._send(self._steps[min(self.asked, len(self._steps)) - 1])


def shell_code(returncode: int) -> int:
    """Return a process's exit code as a shell states it: 128 + signal if a signal ended it."""
    # subprocess returns a signal as a negative number
    return returncode if returncode >= 0 else 128 - returncode


def one_line(text: str) -> str:
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())


@dataclass(frozen=True)
class Ended:
    """How a launcher ended."""

    code: int
    """Its exit code; 128 + signal if a signal ended it."""
    was_asked: bool
    """Whether a signal asked this process to stop; mpirun's code does not show it (1 after a second Ctrl-C)."""
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
    rank_0_ended: Callable[[], bool] | None = None,
    watch: Callable[[int], object] | None = None,
) -> Ended:
    """Start argv and wait for its end. should_restart: called every MORE_HOSTS_SECONDS; if true, the job is stopped.

    rank_0_ended: called every LOOK_SECONDS; if true, rank 0 ended some time ago, and the launcher is ended: it
    might otherwise wait a quarter of an hour for a lost host.

    The job runs in a new session, so Ctrl-C reaches only this process. The first Ctrl-C sends asks_to_stop to the
    launcher, which passes it on (the ranks save a checkpoint and stop), the second SIGTERM, the third SIGKILL. If this
    process is killed, the launcher gets asks_to_stop. Under nohup a closed terminal changes nothing. watch: function
    of an ending_orphans that the caller entered before it created files for the job; None: one is entered here.
    Raises: LaunchOptionError when the launcher is not installed.
    """
    started: list[subprocess.Popen[bytes]] = []
    stopper = Stopper(partial(_send, started), asks_to_stop, signal.SIGTERM, signal.SIGKILL)
    for_restart = outlived = False
    with handling_stops(stopper), nullcontext(watch) if watch else ending_orphans(asks_to_stop) as watching:
        process = start_process(argv, environ=environ)
        watching(process.pid)
        started.append(process)
        # repeat earlier requests, which had no receiver; twice does no harm this early
        if stopper.asked:
            process.send_signal(asks_to_stop)
        asked_at = monotonic()
        while True:
            pauses = [MORE_HOSTS_SECONDS] * (should_restart is not None) + [LOOK_SECONDS] * (rank_0_ended is not None)
            try:
                code = process.wait(timeout=min(pauses, default=None))
                break
            except subprocess.TimeoutExpired:
                if rank_0_ended is not None and rank_0_ended():
                    outlived = True
                    code = _end(process, argv[0])
                    break
                if should_restart is not None and monotonic() - asked_at >= MORE_HOSTS_SECONDS:
                    for_restart, asked_at = should_restart(), monotonic()
                    if for_restart:
                        should_restart = None  # once is enough
                        if not stopper.asked:
                            process.send_signal(asks_to_stop)
    return Ended(shell_code(code), was_asked=stopper.asked > 0, for_restart=for_restart, outlived_rank_0=outlived)


def start_process(argv: Sequence[str], *, environ: Mapping[str, str], **others: Any) -> "subprocess.Popen[bytes]":
    """Start a process in a new session, without input: a job would consume the rest of a loop's list, or of a script.

    others: of Popen. Raises: LaunchOptionError if its program is not installed.
    """
    try:
        return subprocess.Popen(argv, env=dict(environ), stdin=subprocess.DEVNULL, start_new_session=True, **others)
    except FileNotFoundError as error:
        remedy = MISSING.get(Path(argv[0]).name, "install it, or use another launcher")
        raise LaunchOptionError(f"{argv[0]} is not installed here: {remedy}") from error


def _end(process: "subprocess.Popen[bytes]", name: str) -> int:
    """End a launcher whose ranks have ended; return its code."""
    tell(f"{Path(name).name} still runs although the job's first rank has ended: ending it")
    process.terminate()
    try:
        return process.wait(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with its children, such as ssh
        return process.wait()


def _send(started: "Sequence[subprocess.Popen[bytes]]", number: signal.Signals) -> None:
    for process in started:
        process.send_signal(number)
