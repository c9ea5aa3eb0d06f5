"""Ranks that `bigbatch launch local` starts, as real processes."""

import subprocess
import sys
from pathlib import Path

import pytest

RANK = """
import os, pathlib, sys, time
held = set()
for pid in (os.getpid(), os.getppid()):
    for fd in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            held.add(os.readlink(fd))
        except FileNotFoundError:
            pass
doors = []
for table in ("tcp", "tcp6"):
    for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and f"socket:[{words[9]}]" in held:
            doors.append(words[1])
rank = os.environ["RANK"]
place = f"{rank} of {os.environ['WORLD_SIZE']} at {os.environ['MASTER_ADDR']}"
pathlib.Path(f"{rank}.aside").write_text(f"{place}: {doors}")
os.rename(f"{rank}.aside", f"{rank}.txt")
if rank == "1":
    while not os.path.exists("0.txt"):
        time.sleep(0.01)
    sys.exit(int(sys.argv[1]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_local_opens_no_door_and_ends_with_the_code_of_the_rank_that_failed(tmp_path: Path) -> None:
    """torchrun's --standalone, which started them before, listens on all interfaces and loads pickles from there."""
    (tmp_path / "rank.py").write_text(RANK)
    argv = [sys.executable, "-m", "bigbatch", "launch", "local", "--ranks", "2", "--python", "--", "rank.py", "7"]
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7, done.stderr
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text() == f"{rank} of 2 at 127.0.0.1: []"
