"""A script of one's own through the launchers that start ranks here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_parallel import needs_mpi

SCRIPT = """
import json, sys, pathlib
import torch, bigbatch
communicator = bigbatch.connect()
numbers = communicator.allocate(3, torch.float32).fill_(2.0 ** communicator.rank)
communicator.all_reduce_(numbers)
told = [numbers.tolist(), communicator.world_size, str(communicator.device), sys.argv[2:]]
(pathlib.Path(sys.argv[1]) / str(communicator.rank)).write_text(json.dumps(told))
communicator.close()
sys.exit(5 if "fail" in sys.argv else 0)
"""


def launch(launcher: str, folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    script = folder / "my train.py"
    script.write_text(SCRIPT)
    argv = [sys.executable, "-m", "bigbatch", "launch", launcher, "--ranks", "2", "--device", "cpu"]
    return subprocess.run(
        [*argv, "--python", "--", str(script), str(folder), *words],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("mpirun", marks=(needs_mpi, pytest.mark.long)),
        pytest.param("torchrun", marks=pytest.mark.long),
        pytest.param("local", marks=pytest.mark.long),
    ],
)
def test_own_script_runs_on_every_rank_with_its_arguments(launcher: str, tmp_path: Path) -> None:
    done = launch(launcher, tmp_path, "--rate", "a b")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / str(rank)).read_text()) == [[3.0] * 3, 2, "cpu", ["--rate", "a b"]]


@needs_mpi
@pytest.mark.long
def test_own_script_ends_the_job_with_its_code(tmp_path: Path) -> None:
    assert launch("mpirun", tmp_path, "fail").returncode == 5
