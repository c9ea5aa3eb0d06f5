"""What a process has started is ended if it is killed, as real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

LAUNCHER = """
import os, signal, sys
from pathlib import Path
from bigbatch.orphans import ending_orphans
with ending_orphans(signal.SIGUSR1, leaves=[Path(sys.argv[1])]) as watch:
    for number in range(2):
        child = os.posix_spawn("/bin/sh", ["sh", "-c", sys.argv[2]], os.environ)
        watch(child)
    print("watched", flush=True)
    sys.stdin.readline()
"""
CHILD = "trap 'echo asked; sleep 0.3; ls $0; echo ended; exit' USR1; echo ready; while :; do sleep 0.02; done"


@pytest.fixture
def left(tmp_path: Path) -> Path:
    path = tmp_path / ".stopped-x"
    path.touch()
    return path


def start(left: Path) -> "subprocess.Popen[str]":
    argv = [sys.executable, "-c", LAUNCHER, str(left), CHILD.replace("$0", str(left))]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    assert sorted(process.stdout.readline() for _ in range(3)) == ["ready\n", "ready\n", "watched\n"]
    return process


def test_children_of_a_killed_process_are_asked_and_what_it_leaves_is_removed_after_them(left: Path) -> None:
    process = start(left)
    process.kill()
    assert process.stdout is not None
    assert sorted(process.stdout.read().split()) == sorted(["asked", str(left), "ended"] * 2)
    deadline = time.monotonic() + 100
    while left.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_children_of_a_process_that_ends_by_itself_are_its_own_business(left: Path) -> None:
    process = start(left)
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    assert process.wait(timeout=100) == 0
    time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.stdout.read() == ""
    assert left.exists()
