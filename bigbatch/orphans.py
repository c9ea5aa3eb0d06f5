"""End the child processes of a process that was killed, even by SIGKILL, which it cannot pass on."""

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from signal import Signals

WATCHER = """
pids=
while read -r pid; do pids="$pids $pid"; done
for pid in $pids; do kill -s "$0" "$pid"; done
for pid in $pids; do while [ -e "/proc/$pid/exe" ]; do sleep 0.2; done; done
rm -rf -- "$@"
"""
"""Reads process ids until all writers have ended, then ends them. A zombie, perhaps never reaped, has no exe."""


@contextmanager
def ending_orphans(number: Signals, *, leaves: Sequence[Path] = ()) -> Iterator[Callable[[int], None]]:
    """Yield a function that registers a process id: if this process is killed inside, each of them gets the signal.

    leaves: files and folders that are removed after these processes have ended. A shell in its own session does
    both: it reads a pipe that ends with this process. Unlike the parent-death signal (prctl) it outlives the job.
    """
    argv = ["/bin/sh", "-c", WATCHER, number.name.removeprefix("SIG"), *map(str, leaves)]
    nowhere = subprocess.DEVNULL
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True, bufsize=0
    ) as watcher:

        def watch(pid: int) -> None:
            assert watcher.stdin is not None
            with suppress(BrokenPipeError):  # without a watcher the job runs all the same
                watcher.stdin.write(b"%d\n" % pid)

        try:
            yield watch
        finally:
            watcher.kill()
