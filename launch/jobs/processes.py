"""Run the processes of a job: one that fails ends all, Ctrl-C asks them to stop, and no process is left."""

import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from bigbatch.comm.rendezvous.environ import JOINS_VARIABLE
from bigbatch.errors import INTERRUPTED, LOST, tell
from bigbatch.files import write_whole
from bigbatch.launch.jobs.foreground import Ended, Stopper, shell_code, start_process
from bigbatch.launch.jobs.restarts import may_restart
from bigbatch.orphans import ending_orphans
from bigbatch.trainer.step.signals import handling_stops

LOOK_SECONDS = 0.05
"""Period of the check which processes have ended."""
GRACE_SECONDS = 12.0
"""Time for the others to end after SIGTERM when one has failed: rank 0 may finish a checkpoint."""


@dataclass(frozen=True)
class NodeProcess:
    """One process of a job; variables are added to the environment."""

    node: int
    """Node of an emulated cluster; otherwise 0, this machine."""
    argv: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    name: str = ""
    """Name for the message if it fails first, such as rank 2 on n1; empty: it reports its failure itself."""
    descriptors: tuple[int, ...] = ()
    """Open descriptors that it alone inherits: they are closed here once it has started."""


def run_processes(
    starts: Sequence[NodeProcess],
    *,
    environ: Mapping[str, str],
    enter: Callable[[int], None] | None = None,
    asks_to_stop: signal.Signals,
    heals: Callable[[], bool] | None = None,
    joins: int = 0,
    is_part: bool = False,
    on_poll: Callable[[], object] = lambda: None,
) -> Ended:
    """Start all and wait; return 0 if all succeeded, else the code of the first that failed, which is named.

    heals: called when a process is lost (signal, CRASHED or LOST); if true, the others continue. The result is then 0
    if any succeeds and all failures are such lost processes. If one exits with LOST and all others stay stopped
    (SIGSTOP) for the next GRACE_SECONDS, none can continue, and all are ended.
    joins: number of restarts in all, if the others continue. A process that a signal or CRASHED ended starts again to
    join them, unless it was restarted before and has not joined yet, one has finished, or no others run.
    is_part: processes of the job run elsewhere, too: a single one that a signal ended may restart to join those.
    enter(node): called in each new process. on_poll: called every LOOK_SECONDS. Every process has its own session, so
    Ctrl-C reaches only this one: the first sends asks_to_stop to all, the second SIGTERM, the third SIGKILL. If this
    process is killed, they get asks_to_stop; in an emulated cluster, whose process numbers differ, its own watcher ends
    them. A Ctrl-C before all have started ends those that have: there is nothing to save yet.
    Raises: LaunchOptionError if a program is not installed; SubprocessError if a process cannot enter its node.
    """
    running: dict[int, subprocess.Popen[bytes]] = {}
    stopper = Stopper(running.values, asks_to_stop)
    folder = Path(tempfile.gettempdir(), f"bigbatch-joins-{secrets.token_hex(8)}")
    watching: AbstractContextManager[Callable[[int], None]]
    watching = ending_orphans(asks_to_stop, leaves=(folder,)) if enter is None else nullcontext(lambda pid: None)
    with handling_stops(stopper), watching as watch:
        if joins:
            folder.mkdir(mode=0o700)
        has_to_join = lambda number: (folder / f"{number}").exists()  # noqa: E731

        def begin(number: int, start: NodeProcess) -> None:
            running[number] = start_process(
                start.argv,
                environ=dict(environ) | dict(start.variables),
                preexec_fn=None if enter is None else partial(enter, start.node),
                pass_fds=start.descriptors,
            )
            for descriptor in start.descriptors:
                os.close(descriptor)
            watch(running[number].pid)

        def start_again(number: int) -> bool:
            nonlocal joins
            if not joins or stopper.asked:
                return False
            joins -= 1
            path = folder / f"{number}"
            write_whole(path, b"")
            variables = (*starts[number].variables, (JOINS_VARIABLE, f"{path}"))
            begin(number, replace(starts[number], variables=variables, descriptors=()))
            return True

        def look() -> None:
            on_poll()
            stopper.repeat_if_lost()

        try:
            for number, start in enumerate(starts):
                begin(number, start)
                # a signal may have come before this process was in the list
                if stopper.asked:
                    return Ended(INTERRUPTED, was_asked=True)
            names = [start.name for start in starts]
            code = _wait(
                running,
                names=names,
                heals=heals,
                start_again=start_again,
                has_to_join=has_to_join,
                is_part=is_part,
                on_poll=look,
                code_of=stopper.code_of,
            )
            return Ended(code, was_asked=stopper.asked > 0, was_terminated=stopper.was_terminated)
        finally:
            _send(running, signal.SIGKILL)
            for process in running.values():
                process.wait()
            shutil.rmtree(folder, ignore_errors=True)


def _wait(
    running: dict[int, subprocess.Popen[bytes]],
    *,
    names: Sequence[str],
    heals: Callable[[], bool] | None = None,
    start_again: Callable[[int], bool] = lambda number: False,
    has_to_join: Callable[[int], bool] = lambda number: False,
    is_part: bool = False,
    on_poll: Callable[[], object] = lambda: None,
    code_of: Callable[[int], int] = shell_code,
) -> int:
    """Wait until all have ended; each is removed from running when it ends.

    start_again(number): starts a lost process again, and returns whether it did. has_to_join(number): returns whether
    a restarted process has not joined the others yet. code_of: returns a shell's code of Popen's, or 130 if the
    process was asked to stop. It polls: a process in a cluster's namespaces cannot start threads that would wait.
    """
    failed: int | None = None
    has_finished = False
    is_stuck = False
    """Whether one has exited with LOST, and all others have been stopped since."""
    since_end = 0.0  # counted in polls: none happens while this process is stopped, as in a suspended job
    while running:
        time.sleep(LOOK_SECONDS)
        on_poll()
        since_end += LOOK_SECONDS
        ended = {number: code for number, process in running.items() if (code := process.poll()) is not None}
        is_stuck = is_stuck and all(_is_stopped(running[number]) for number in running.keys() - ended.keys())
        # a process that ends because another one was lost is not the cause
        for number, code in sorted(ended.items(), key=lambda each: each[1] == LOST):
            del running[number]
            since_end = 0.0
            has_finished = has_finished or (heals is not None and code == 0)
            is_lost = failed is None and may_restart(code_of(code), is_python=False)
            is_lost = is_lost and heals is not None and heals()
            left = {each for each in running if not has_to_join(each)}  # that can continue
            others_run = left - ended.keys() or (is_part and len(names) == 1 and code < 0)
            may_join = is_lost and code != LOST and others_run and not (has_finished or has_to_join(number))
            starts = may_join and start_again(number)
            if is_lost and (left or has_finished or starts):
                is_stuck = is_stuck or code == LOST
                consequence = "; it restarts, to join the others" if starts else "; the others may continue"
                tell(f"{names[number]} {describe_exit(code)}{'' if has_finished else consequence}")
                continue
            # the first failure is the cause; later ones follow from our SIGTERM
            if code != 0 and failed is None:
                failed = code_of(code)
                # a single process has reported its failure itself, except for a signal
                if names[number] and failed != INTERRUPTED and (running or code < 0):
                    others = "; ending the others" if running else ""
                    tell(f"{names[number]} {describe_exit(code)}{others}")
                _send(running, signal.SIGTERM)
        if is_stuck and running and failed is None and since_end > GRACE_SECONDS:
            failed, since_end = LOST, 0.0
            tell("the remaining processes are stopped (SIGSTOP), and none can continue; ending them")
            _send(running, signal.SIGTERM)
        if (failed is not None or has_finished) and since_end > GRACE_SECONDS:
            _send(running, signal.SIGKILL)  # they ignored SIGTERM, or are stopped and were left behind
    return failed or 0


def _is_stopped(process: "subprocess.Popen[bytes]") -> bool:
    """Return whether a running process is stopped (SIGSTOP)."""
    return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None


def describe_exit(returncode: int) -> str:
    """Return the end of a process in words, by Popen's code: negative for a signal."""
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    known = {number.value: number.name for number in signal.Signals}  # a real-time signal has no name
    return f"was ended by {known.get(-returncode, f'signal {-returncode}')}"


def _send(running: Mapping[int, subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for process in tuple(running.values()):
        process.send_signal(number)
        if number == signal.SIGTERM:
            process.send_signal(signal.SIGCONT)  # a stopped process handles it only after it continues
