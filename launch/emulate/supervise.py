"""Run the processes of a job together: one that fails ends all, Ctrl-C asks them to stop, nothing outlives them."""

import os
import select
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from bigbatch.errors import LaunchOptionError
from bigbatch.launch.emulate.launchers import NodeProcess
from bigbatch.launch.jobs.foreground import Stopper, handling_stops, shell_code

GRACE_SECONDS = 5.0
"""How long the others may take to end by SIGTERM after one has failed."""


def run_together(
    starts: Sequence[NodeProcess],
    *,
    environ: Mapping[str, str],
    enter: Callable[[int], None],
    asks_to_stop: signal.Signals,
) -> int:
    """Start all and wait; return 0 where all ended well, else the code of the first that failed, 128 + signal.

    enter(node) is called in each new process. Every process gets a session of its own, so that Ctrl-C reaches only
    this one: the first becomes asks_to_stop for all, the second SIGTERM, the third SIGKILL. Before all are there, the
    first one ends those that are: none can have done anything that is worth saving.
    Raises: LaunchOptionError when a program is not installed; SubprocessError when a process cannot enter its node.
    """
    running: dict[int, subprocess.Popen[bytes]] = {}
    stopper = Stopper(partial(_send, running), asks_to_stop, signal.SIGTERM, signal.SIGKILL)
    with handling_stops(stopper):
        try:
            for start in starts:
                process = _start(start, environ=environ, enter=enter)
                # a file descriptor that becomes readable at its end: select waits for all at once
                running[os.pidfd_open(process.pid)] = process
                # a signal may have come between start and entry, and missed this one
                if stopper.asked:
                    return 128 + signal.SIGINT
            return _wait(running)
        finally:
            _send(running, signal.SIGKILL)
            for pidfd, process in running.items():
                process.wait()
                os.close(pidfd)


def _start(start: NodeProcess, *, environ: Mapping[str, str], enter: Callable[[int], None]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            start.argv,
            env=dict(environ) | dict(start.variables),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: enter(start.node),
        )
    except FileNotFoundError as error:
        raise LaunchOptionError(
            f"{start.argv[0]} is not installed: pip install 'bigbatch[mpi]', or use --launcher torchrun"
        ) from error


def _wait(running: dict[int, subprocess.Popen[bytes]]) -> int:
    """Wait until all have ended; they leave running one by one, those that were told to end, too."""
    failed: int | None = None
    while running:
        ended = select.select(list(running), (), (), GRACE_SECONDS if failed is not None else None)[0]
        if not ended:  # one has failed, and these did not heed the SIGTERM after it
            _send(running, signal.SIGKILL)
        for pidfd in ended:
            process = running.pop(pidfd)
            os.close(pidfd)
            code = process.wait()
            # the first failure is the cause; those after it follow from our SIGTERM
            if code != 0 and failed is None:
                failed = shell_code(code)
                _send(running, signal.SIGTERM)
    return failed or 0


def _send(running: Mapping[int, subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in tuple(running.values()):
        process.send_signal(number)
