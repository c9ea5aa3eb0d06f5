"""The foreground runner: exit codes, and signals to real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bigbatch.errors import LaunchOptionError
from bigbatch.launch.jobs.foreground import run_in_foreground


def in_foreground(argv: list[str]) -> int:
    return run_in_foreground(argv, environ=os.environ, asks_to_stop=signal.SIGUSR1).code


def test_foreground_exit_codes_pass_through() -> None:
    assert in_foreground([sys.executable, "-c", "raise SystemExit(3)"]) == 3
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert in_foreground([sys.executable, "-c", killed]) == 128 + signal.SIGKILL


def test_foreground_launcher_that_is_missing_names_the_extra() -> None:
    with pytest.raises(LaunchOptionError, match=r"pip install 'bigbatch\[mpi\]'"):
        in_foreground(["no-such-mpirun"])


PARENT = """
import signal
import sys
from bigbatch.launch.jobs.foreground import run_in_foreground
import os
argv = [sys.executable, "-c", sys.argv[1]]
ended = run_in_foreground(argv, environ=os.environ, asks_to_stop=signal.SIGUSR1)
print("asked" if ended.was_asked else "by itself", flush=True)
sys.exit(ended.code)
"""


CHILD = """
import signal, sys, time
def note(number, frame):
    print(signal.Signals(number).name, flush=True)
    if number == signal.SIGTERM:
        sys.exit(5)
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, note)
print("ready", flush=True)
while True:
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("disposition", "num_interrupts"), [(signal.SIG_DFL, 1), (signal.SIG_IGN, 2)])
def test_foreground_takes_a_closed_terminal_for_a_ctrl_c_except_under_nohup(
    disposition: int, num_interrupts: int
) -> None:
    """What asks must not end the launcher, and the second that asks ends the job."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, disposition),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGHUP, *[signal.SIGINT] * num_interrupts):
        assert process.poll() is None
        process.send_signal(number)
        time.sleep(0.3)
    assert process.wait(timeout=20) == 5
    assert process.stdout.read() == "SIGUSR1\nSIGTERM\nasked\n"


def test_foreground_first_ctrl_c_asks_and_second_ends(tmp_path: Path) -> None:
    """The whole process group gets SIGINT, as from a terminal; the child must hear SIGUSR1, then SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "SIGUSR1\n"
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    assert process.stdout.readline() == "SIGTERM\n"
    assert process.wait(timeout=20) == 5
