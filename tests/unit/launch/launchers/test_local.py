"""Ranks that `bigbatch launch local` starts, as real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from error_texts import naming

from bigbatch.errors import JobRefused
from bigbatch.launch.start import main

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
secret = os.environ["BIGBATCH_SECRET"]
assert not any(secret in pathlib.Path(f"/proc/{pid}/cmdline").read_text() for pid in (os.getpid(), os.getppid()))
pathlib.Path(f"{rank}.secret").write_text(secret)
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
    done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=140, check=False)
    assert done.returncode == 7, done.stderr
    secrets = {(tmp_path / f"{rank}.secret").read_text() for rank in range(2)}
    assert [len(bytes.fromhex(secret)) for secret in secrets] == [32]
    for rank in range(2):
        assert (tmp_path / f"{rank}.txt").read_text() == f"{rank} of 2 at 127.0.0.1: []"


PART = """
import os, pathlib, sys, time
rank = os.environ["RANK"]
names = ("WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT", "BIGBATCH_SECRET")
pathlib.Path(f"{rank}.aside").write_text(" ".join(os.environ[name] for name in names))
os.rename(f"{rank}.aside", f"{rank}.txt")
if rank == "3":
    while not os.path.exists("2.txt"):
        time.sleep(0.01)
    sys.exit(int(sys.argv[1]))
"""


def test_local_starts_one_nodes_part_of_a_job(tmp_path: Path) -> None:
    """It uses the secret that all nodes were given, and exits with the code of its own ranks."""
    (tmp_path / "part.py").write_text(PART)
    for node, code in ((0, 0), (1, 6)):
        argv = [sys.executable, "-m", "bigbatch", "launch", "local", "--nodes", "2", "--node-rank", str(node)]
        argv += ["--master", "pod-0:29500", "--ranks-per-node", "2", "--python", "--", "part.py", "6"]
        environ = os.environ | {"BIGBATCH_SECRET": "shared"}
        done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=140, check=False)
        assert done.returncode == code, done.stderr
    assert [(tmp_path / f"{rank}.txt").read_text() for rank in range(4)] == [
        f"4 {local} 2 {node} pod-0 29500 shared" for node in range(2) for local in range(2)
    ]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--nodes", "2"), ("--nodes 2", "--master HOST:PORT", "--node-rank")),
        (("--nodes", "2", "--master", "n0:1"), ("--nodes 2", "--node-rank", "0 to 1")),
        (("--nodes", "2", "--master", "n0:1", "--node-rank", "-1"), ("--node-rank -1",)),
        (("--nodes", "2", "--master", "n0:1", "--node-rank", "2"), ("--node-rank 2", "--nodes 2")),
        (("--nodes", "2", "--master", "n0:1", "--node-rank", "0", "--restarts", "1"), ("--restarts", "mpirun")),
    ],
)
def test_local_part_of_a_job_knows_its_place(words: tuple[str, ...], named: tuple[str, ...]) -> None:
    with pytest.raises(JobRefused, match=naming(*named)):
        main(["local", *words, "--ranks-per-node", "1", "--dry-run", "--", "train", "--config", "quickstart"])
