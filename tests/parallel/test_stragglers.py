"""A real rank that computes more slowly than the other is seen, measured and named."""

import json
import re
import socket
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch.nn.functional as F
from forked_ranks import bigbatch
from torch import Tensor

from bigbatch.comm.rendezvous.environ import read_process_env
from tests.laws.jobs import Forked, records, run

SLEEP_SECONDS = 0.5  # far more than a busy machine adds
SETTINGS = {
    "data.loader": "synthetic",
    "data.num_synthetic_samples": 16 * 8,
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


def slow_bigbatch(*command: str) -> int:
    """What a rank runs: bigbatch, where rank 1 sleeps in each loss."""
    fast = F.cross_entropy

    def slow(*arguments: Any, **options: Any) -> Tensor:
        time.sleep(SLEEP_SECONDS)
        return fast(*arguments, **options)

    if read_process_env().rank == 1:
        F.cross_entropy = slow
    return bigbatch(*command)


@pytest.mark.long
def test_straggler_is_measured_and_named(tmp_path: Path) -> None:
    """The other rank waits for it in each step, so on average they wait for half of the time that it sleeps."""
    options = [f"--{key}={value}" for key, value in SETTINGS.items()]
    command = ("train", "--config", "quickstart", f"--run.directory={tmp_path / 'run'}", *options)
    done = run(Forked(command, ranks=2, target="tests.parallel.test_stragglers:slow_bigbatch"))
    reports = records(tmp_path / "run", "train")[1:]
    lost = [report["straggler_fraction"] * 16 / report["images_per_second"] for report in reports]
    assert 0.4 * SLEEP_SECONDS < median(lost) < 0.7 * SLEEP_SECONDS, lost
    named = rf"rank 1 on {re.escape(socket.gethostname())}\b.*bigbatch launch preflight"
    assert re.search(named, done.stdout), done.stdout
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["straggler_fraction"] > 0.1
    assert (summary["energy_joules"], summary["gpu_hours"], summary["num_nodes"]) == (None, None, 1)
