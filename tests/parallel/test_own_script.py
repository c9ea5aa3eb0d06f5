"""A script of one's own through mpirun, which starts ranks here."""

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


@needs_mpi
@pytest.mark.long
def test_own_script_runs_on_every_rank_with_its_arguments(tmp_path: Path) -> None:
    """And ends the job with its code."""
    script = tmp_path / "my train.py"
    script.write_text(SCRIPT)
    argv = [sys.executable, "-m", "bigbatch", "launch", "mpirun", "--ranks", "2", "--device", "cpu", "--python", "--"]
    words = ["--rate", "a b", "fail"]
    done = subprocess.run(
        [*argv, str(script), str(tmp_path), *words], capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 5, done.stdout + done.stderr
    for rank in range(2):
        assert json.loads((tmp_path / str(rank)).read_text()) == [[3.0] * 3, 2, "cpu", words]
