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


@pytest.mark.long
@pytest.mark.parametrize(
    ("launcher", "words", "code"),
    [
        pytest.param("mpirun", ["--rate", "a b", "fail"], 5, marks=needs_mpi),
        ("torchrun", ["--rate", "a b"], 0),
        ("local", ["--rate", "a b"], 0),
    ],
)
def test_own_script_runs_on_every_rank_with_its_arguments(
    launcher: str, words: list[str], code: int, tmp_path: Path
) -> None:
    """And ends the job with its code."""
    done = launch(launcher, tmp_path, *words)
    assert done.returncode == code, done.stdout + done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / str(rank)).read_text()) == [[3.0] * 3, 2, "cpu", words]
