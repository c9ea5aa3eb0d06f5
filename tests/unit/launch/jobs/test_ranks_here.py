"""What /proc shows of a job's processes: which signal its ranks can take, and what they left running."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from bigbatch.launch.jobs.ranks_here import children, ranks_of, stop_signal

pytestmark = pytest.mark.skipif(not Path("/proc/thread-self/children").exists(), reason="reads /proc")

LAUNCHER = 'trap : USR1; "$0" -c "$1" & "$0" -c "$1" & wait; wait'
WAITS = "import os, signal, sys, time\n{}\nos.write(1, b'.')\ntime.sleep(600)"
HANDLES = "signal.signal(signal.SIGUSR1, lambda *_: None)"


@contextmanager
def launcher(
    script: str, rank: str, *, num_ranks: int = 2, variables: Mapping[str, str] = {"OMPI_COMM_WORLD_RANK": "0"}
) -> Iterator[int]:
    """A launcher whose ranks have started."""
    argv = ["bash", "-c", script, sys.executable, rank]
    with subprocess.Popen(
        argv, env={**os.environ, **variables}, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.read(num_ranks) == b"." * num_ranks
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("script", "does", "expected"),
    [
        (LAUNCHER, HANDLES, signal.SIGUSR1),
        (LAUNCHER, "signal.signal(signal.SIGUSR1, signal.SIG_IGN)", signal.SIGUSR1),
        (LAUNCHER, "", signal.SIGTERM),  # it still imports torch
        # a launcher within a launcher, as the daemons of mpirun; and one that cannot take the signal yet
        (f'trap : USR1; bash -c \'{LAUNCHER}\' "$0" "$1" & wait; wait', "", signal.SIGTERM),
        (LAUNCHER.replace("trap : USR1", "trap - USR1"), HANDLES, signal.SIGTERM),
    ],
)
def test_launcher_is_asked_by_the_signal_that_all_its_ranks_can_take(
    script: str, does: str, expected: signal.Signals
) -> None:
    with launcher(script, WAITS.format(does)) as pid:
        assert len(ranks_of(pid)) == 2
        assert stop_signal(pid, signal.SIGUSR1) == expected
        assert stop_signal(pid, signal.SIGTERM) == signal.SIGTERM


def test_workers_of_a_rank_need_not_take_the_signal() -> None:
    """A loader's processes are Python, too; SIGTERM would lose the run's steps since its last checkpoint."""
    worker = "import subprocess; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"
    with launcher('trap : USR1; "$0" -c "$1" & wait; wait', WAITS.format(f"{HANDLES}\n{worker}"), num_ranks=1) as pid:
        (rank,) = ranks_of(pid)
        assert len(children(rank)) == 1
        assert stop_signal(pid, signal.SIGUSR1) == signal.SIGUSR1


def test_agent_of_a_launcher_is_no_rank() -> None:
    """A command in Python by which mpirun starts daemons elsewhere: for its sake no rank may lose the time to save."""
    with launcher('trap : USR1; "$0" -c "$1" & wait; wait', WAITS.format(""), num_ranks=1, variables={}) as pid:
        assert ranks_of(pid) == []
        assert stop_signal(pid, signal.SIGUSR1) == signal.SIGUSR1


def test_process_that_has_ended_is_asked_as_usual() -> None:
    with subprocess.Popen(["true"], stdin=subprocess.DEVNULL) as ended:
        pass
    assert stop_signal(ended.pid, signal.SIGUSR1) == signal.SIGUSR1
