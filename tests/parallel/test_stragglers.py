"""A real rank that computes more slowly than the other is seen, measured and named."""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from bigbatch.trainer.run.folder import RunDir, read_records

pytestmark = pytest.mark.long

SLEEP_SECONDS = 0.5  # far more than a busy machine adds
SCRIPT = f"""
import os, sys, time
import torch.nn.functional as F

if os.environ["RANK"] == "1":
    fast = F.cross_entropy
    def slow(*arguments, **options):
        time.sleep({SLEEP_SECONDS})
        return fast(*arguments, **options)
    F.cross_entropy = slow
from bigbatch.cli import main
sys.exit(main(sys.argv[1:]))
"""
SETTINGS = {
    "data.loader": "synthetic",
    "data.num_synthetic_samples": 16 * 12,
    "data.image_size": 32,
    "data.probe_seconds": 0,
    "model.options.width": 4,
    "batch.global_batch_size": 16,
    "batch.microbatch_size": 8,
    "batch.bn_span": 8,
    "run.epochs": 1,
    "run.log_every_steps": 2,
    "schedule.warmup_epochs": 0,
}


def test_straggler_is_measured_and_named(tmp_path: Path) -> None:
    """The other rank waits for it in each step, so on average they wait for half of the time that it sleeps."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    options = [f"--{key}={value}" for key, value in SETTINGS.items()]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    command = ["train", "--config", "quickstart", f"--run.directory={tmp_path / 'run'}", *options]
    done = subprocess.run([*launch, *command], capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    records = [record for record in read_records(RunDir(tmp_path / "run").metrics) if record["kind"] == "train"][1:]
    lost = [record["straggler_fraction"] * 16 / record["images_per_second"] for record in records]
    assert 0.4 * SLEEP_SECONDS < median(lost) < 0.7 * SLEEP_SECONDS, lost
    named = rf"rank 1 on {re.escape(socket.gethostname())}\b.*bigbatch launch preflight"
    assert re.search(named, done.stdout), done.stdout
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["straggler_fraction"] > 0.1
    assert (summary["energy_joules"], summary["gpu_hours"], summary["num_nodes"]) == (None, None, 1)
