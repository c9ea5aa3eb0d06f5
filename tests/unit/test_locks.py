"""Locks between processes: which process holds them, and when they are free again."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from error_texts import naming

from bigbatch.locks import open_lock, try_lock, wait_lock

HOLD = """
import sys
from pathlib import Path
from bigbatch.locks import open_lock, wait_lock
file = open_lock(Path(sys.argv[1]))
wait_lock(file)
print("held", flush=True)
sys.stdin.read()
"""


def is_free(path: Path) -> bool:
    with open_lock(path) as file:
        return try_lock(file)


def holder(path: Path) -> subprocess.Popen[str]:
    """A process that holds the lock until its input ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], text=True, **pipes)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


@pytest.mark.parametrize("is_killed", [False, True])
def test_locks_are_free_when_their_process_ends_however_that_is(tmp_path: Path, is_killed: bool) -> None:
    path = tmp_path / "lock"
    with holder(path) as process:
        assert not is_free(path)
        if is_killed:
            process.kill()
        else:
            process.communicate("")
        process.wait()
    assert is_free(path)


def test_locks_are_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with open_lock(path) as ours:
        assert try_lock(ours)
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        waiting = subprocess.Popen([sys.executable, "-c", HOLD, str(path)], text=True, **pipes)
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(0.5)
    assert waiting.communicate(timeout=200)[0] == "held\n"


@pytest.mark.parametrize("is_passed", [False, True])
def test_locks_are_inherited_by_a_child_that_gets_the_file_and_by_no_other(tmp_path: Path, is_passed: bool) -> None:
    path = tmp_path / "lock"
    with open_lock(path) as file:
        wait_lock(file)
        passed = (file.fileno(),) if is_passed else ()
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=passed)
    assert is_free(path) is not is_passed
    child.communicate(b"")
    assert is_free(path)


def test_locks_keep_what_their_file_holds_and_follow_no_link(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("theirs")
    with open_lock(tmp_path / "theirs") as file:
        assert try_lock(file)
    (tmp_path / "lock").symlink_to("theirs")
    with pytest.raises(OSError, match=naming(os.strerror(errno.ELOOP))):
        open_lock(tmp_path / "lock")
    assert (tmp_path / "theirs").read_text() == "theirs"


def test_locks_of_a_folder(tmp_path: Path) -> None:
    first, second = (os.open(tmp_path, os.O_RDONLY) for _ in range(2))
    assert [try_lock(first), try_lock(second)] == [True, False]
    os.close(first)
    assert try_lock(second)
    os.close(second)


def test_folder_in_the_place_of_a_lock_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=naming(tmp_path, "is a folder", "remove it")):
        open_lock(tmp_path)
