"""The foreground runner: exit codes, and signals to real processes."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bigbatch.errors import INTERRUPTED, LaunchOptionError
from bigbatch.launch.jobs import foreground
from bigbatch.launch.jobs.foreground import Ended, run_in_foreground


def in_foreground(*argv: str, **options: Any) -> Ended:
    return run_in_foreground(list(argv), environ=os.environ, asks_to_stop=signal.SIGUSR1, **options)


def test_foreground_ends_a_launcher_that_its_ranks_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """mpirun waits for a lost host and ignores signals; a healing job could not restart before it ends."""
    monkeypatch.setattr(foreground, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(foreground, "END_SECONDS", 0.2)
    deaf = f"trap '' TERM; touch {tmp_path}/deaf; while :; do sleep 1; done"
    ended = in_foreground("sh", "-c", deaf, rank_0_ended=lambda _: (tmp_path / "deaf").exists())
    assert (ended.code, ended.was_asked) == (128 + signal.SIGKILL, False)
    assert "sh still runs although the job's first rank has ended: ending it" in capfd.readouterr().err


@pytest.mark.parametrize(("is_interrupted", "code"), [(True, INTERRUPTED), (False, 3)])
def test_foreground_ctrl_c_that_comes_while_the_launcher_starts_is_passed_on(
    is_interrupted: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must neither end this process, which would leave the job running unseen, nor be lost."""
    start = subprocess.Popen

    def start_and_interrupt(*words: Any, **options: Any) -> Any:
        process = start(*words, **options)
        if is_interrupted:
            os.kill(os.getpid(), signal.SIGINT)
        return process

    monkeypatch.setattr(foreground.subprocess, "Popen", start_and_interrupt)
    ended = in_foreground("sh", "-c", "exec sleep 600" if is_interrupted else "exit 3")
    assert (ended.code, ended.was_asked) == (code, is_interrupted)


def test_foreground_sends_one_sigterm_to_a_launcher_whose_ranks_cannot_take_a_request() -> None:
    """Two come from `timeout` in a script, or from an impatient user; mpirun prints a text at the second."""
    asks = "kill -INT $PPID; sleep 0.2"
    assert in_foreground("bash", "-c", f"n=10; trap 'n=$((n+1))' TERM; {asks}; {asks}; exit $n").code == 11
    assert in_foreground("bash", "-c", f"n=10; trap : USR1; trap 'n=$((n+1))' TERM; {asks}; {asks}; exit $n").code == 11


@pytest.mark.parametrize(
    ("program", "remedy"),
    [("/none/mpirun", "pip install -e '.[mpi]'"), ("/none/flux", "a host with Flux"), ("/none/x", "install it")],
)
def test_missing_launcher_is_named_with_its_own_remedy(program: str, remedy: str) -> None:
    with pytest.raises(LaunchOptionError, match=f"^{re.escape(program)} is not installed here: .*{re.escape(remedy)}"):
        in_foreground(program)


def test_foreground_job_leaves_the_input_of_a_loop_alone() -> None:
    """`while read` would run once: the first job would consume the other lines."""
    reads = "import sys; print('job', repr(sys.stdin.read()), flush=True)"
    loop = 'while read -r line; do "$0" -c "$1" "$2"; echo "$line"; done'
    done = subprocess.run(
        ["sh", "-c", loop, sys.executable, PARENT, reads], input="one\ntwo\n", stdout=subprocess.PIPE, text=True
    )
    assert done.stdout.splitlines() == ["job ''", "by itself", "one", "job ''", "by itself", "two"]


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
import os, signal, sys, time
def say(text):  # not print, within which a handler may not print again
    os.write(1, text.encode() + b"\\n")
def note(number, frame):
    say(signal.Signals(number).name)
    if number == signal.SIGTERM:
        sys.exit(5)
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, note)
say(f"ready {os.getpid()}")
while True:
    time.sleep(0.05)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_nohup", [False, True])
def test_foreground_takes_a_closed_terminal_for_a_ctrl_c_except_under_nohup(is_nohup: bool) -> None:
    """What asks must not end the launcher, and the second that asks ends the job."""
    disposition = signal.SIG_IGN if is_nohup else signal.SIG_DFL
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, disposition),
    )
    child = ready(process)
    assert process.stdout is not None
    process.send_signal(signal.SIGHUP)
    if is_nohup:
        os.kill(child, signal.SIGTERM)
        assert process.stdout.read() == "SIGTERM\nby itself\n"
    else:
        assert process.stdout.readline() == "SIGUSR1\n"
        process.send_signal(signal.SIGINT)
        assert process.stdout.read() == "SIGTERM\nasked\n"
    assert process.wait(timeout=200) == 5


def test_foreground_job_is_asked_to_stop_if_its_launcher_is_killed() -> None:
    """It would train on unseen, and the same command would be refused meanwhile."""
    process = subprocess.Popen([sys.executable, "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True)
    child = ready(process)
    process.kill()
    assert process.stdout is not None
    assert process.stdout.readline() == "SIGUSR1\n"
    os.kill(child, signal.SIGTERM)
    assert process.stdout.read() == "SIGTERM\n"


def ready(process: "subprocess.Popen[str]") -> int:
    """Wait for the child, and return its number."""
    assert process.stdout is not None
    word, number = process.stdout.readline().split()
    assert word == "ready"
    return int(number)
