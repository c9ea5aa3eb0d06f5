"""Ranks that `bigbatch launch local` starts, as real processes."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers import local
from bigbatch.launch.launchers.local import local_processes, with_own_secret
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


HELD = """
import os, socket, subprocess, sys
from bigbatch.comm.rendezvous.environ import read_process_env
env = read_process_env()
print(env.rank, env.listener is not None and socket.socket(fileno=env.listener).getsockname() == env.master, flush=True)
"""


@pytest.mark.slow
def test_local_gives_rank_0_the_socket_that_holds_the_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The launcher keeps none: a connection to it would be accepted, and never answered."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text(HELD)
    before = set(os.listdir("/proc/self/fd"))
    assert main(["local", "--ranks", "2", "--python", "--", "own.py"]) == 0
    assert sorted(capfd.readouterr().out.splitlines()) == ["0 True", "1 False"]
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("ranks", "is_python", "listens"), [(2, False, True), (2, True, False), (1, False, False), (1, True, False)]
)
def test_local_opens_a_door_only_for_ranks_that_meet(ranks: int, is_python: bool, listens: bool) -> None:
    first, *others = local._holding_port(JobSpec(("train",), ranks, is_python=is_python))
    with socket.socket(fileno=first.descriptors[0]) as holder:
        assert bool(holder.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) == listens
        assert dict(first.variables)["MASTER_PORT"] == str(holder.getsockname()[1])
    assert [start.descriptors for start in others] == [()] * (ranks - 1)


def test_local_restarts_single_ranks_of_several_nodes_but_never_all(capsys: pytest.CaptureFixture[str]) -> None:
    part = ("local", "--dry-run", "--nodes", "2", "--node-rank", "1", "--master", "pod-0:29500", "--restarts", "2")
    assert main([*part, "--", "train", "--config", "quickstart", "--run.heal", "in_place"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("#")]
    assert said == ["# a lost rank starts again, to join the others, up to 2 time(s) in each start of the job"]


def test_local_starts_one_nodes_part_of_a_job() -> None:
    """It uses the secret that all nodes were given."""
    for node in (0, 1):
        job = JobSpec(("own.py",), 4, num_nodes=2, node_rank=node, master=("pod-0", 29500), is_python=True)
        places = [dict(start.variables) for start in local_processes(job, port=1)]
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
        assert [" ".join(place[name] for name in names) for place in places] == [
            f"{2 * node + local} 4 {local} 2 {node} pod-0 29500" for local in range(2)
        ]
        assert with_own_secret(job, {"BIGBATCH_SECRET": "shared"}) == {"BIGBATCH_SECRET": "shared"}
