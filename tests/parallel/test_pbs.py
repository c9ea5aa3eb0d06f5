"""A job of two nodes through the script for PBS, with a qsub that runs it here, and ranks that are real."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from pbs_stubs import PbsStubs

SCRIPT = """
import json, os, pathlib, sys
import torch, bigbatch
communicator = bigbatch.connect()
numbers = communicator.allocate(3, torch.float32).fill_(2.0 ** communicator.rank)
communicator.all_reduce_(numbers)
told = [numbers.tolist(), communicator.world_size, os.environ["BIGBATCH_SECRET"], os.environ["NOTE"]]
pathlib.Path(f"rank-{communicator.rank}").write_text(json.dumps(told))
communicator.close()
sys.exit(5 * communicator.rank)
"""
QSUB = """#!/bin/bash
# qsub -W block=true: prints the number, and ends as the job does
echo "$PBS_JOBID.server"
cat > job
cd / && PBS_ENVIRONMENT=PBS_BATCH bash "$PBS_O_WORKDIR/job" < /dev/null
"""


def test_pbs_job_of_two_nodes_meets_by_its_secret_and_ends_with_its_code(tmp_path: Path) -> None:
    stubs = PbsStubs(tmp_path)
    (tmp_path / "bigbatch").unlink()
    (tmp_path / "qsub").write_text(QSUB)
    (tmp_path / "qsub").chmod(0o755)
    (tmp_path / "nodefile").write_text("localhost\nn1\n")
    (tmp_path / "rank.py").write_text(SCRIPT)
    number = str(os.getpid())  # and so the port
    words = ["launch", "pbs", "--nodes", "2", "--device", "cpu", "--interface", "lo", "--wait"]
    words += ["--env", "NOTE=it's; $(here)", "--python"]
    done = subprocess.run(
        [sys.executable, "-m", "bigbatch", *words, "--", "rank.py"],
        cwd=tmp_path,
        env=stubs.environ(PBS_JOBID=number),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    log = (tmp_path / f"logs/bigbatch-{number}.log").read_text()
    other = (tmp_path / f"logs/bigbatch-{number}/node-1.log").read_text()
    assert done.returncode == 5, done.stdout + done.stderr + log + other
    assert "ended with exit code 5" in log
    told = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in range(2)]
    secret = told[0][2]
    assert re.fullmatch("[0-9a-f]{64}", secret)
    assert told == [[[3.0] * 3, 2, secret, "it's; $(here)"]] * 2
    left = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and not path.name.startswith("rank-")]
    assert not any(secret.encode() in data for data in left)
