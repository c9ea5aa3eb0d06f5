"""A job that loses a node, continues without it, and takes it back."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cut_links import cut

from bigbatch.tools.emulate import cluster as clusters
from bigbatch.tools.emulate.plan import make_plan
from bigbatch.tools.emulate.state import state_root
from bigbatch.trainer.datasets.generated import write_dataset
from tests.laws.jobs import train_command

INSIDE = str(Path(__file__).with_name("mpirun_inside.py"))
SLOW = {
    "run.epochs": 400,
    "run.checkpoint_every_steps": 1,
    "run.eval_every_epochs": 400,
    "comm.timeout_seconds": 6,  # shorter than mpirun needs to notice, which then waits for the lost host
    "comm.meeting_seconds": 15,
    "comm.warn_seconds": 3,
    "data.patience_seconds": 2,
    "data.loader": "torchvision",
    "optimizer.loss": "tests.cluster.slow_loss.loss",
    "optimizer.label_smoothing": 0,
}


def wait_for(is_so: Callable[[], bool], job: "subprocess.Popen[str]", said: Path) -> None:
    """Wait until it is so, while the job runs."""
    deadline = time.monotonic() + 200  # beside other jobs: mpirun may restart with two of three nodes at first
    while not is_so():
        assert job.poll() is None, said.read_text()
        assert time.monotonic() < deadline, said.read_text()
        time.sleep(0.1)


@pytest.mark.timeout(600)
def test_job_goes_on_without_a_node_and_takes_it_back(runtime_folder: Path, tmp_path: Path) -> None:
    """mpirun on four nodes: one is cut off, three share the batch; when it is back, all four do."""
    write_dataset(tmp_path / "data", train_per_class=16, val_per_class=7, side_pixels=(36, 48))
    root, said, run = state_root(os.environ), tmp_path / "said", tmp_path / "run"
    plan = make_plan(name="healing", nodes=4, ranks_per_node="1", link="none", delay="0")
    cluster = clusters.up(plan, root=root, environ=os.environ)
    words = ("launch", "emulate", "run", "--name", plan.name, "--launcher", "plain", "--python", "--", INSIDE)
    hosts = ("--hosts", "n0:1,n1:1,n2:1,n3:1", "--restarts", "1", "--")
    command = train_command(tmp_path / "data", run, SLOW)
    with said.open("w") as output:
        job = subprocess.Popen(
            [sys.executable, "-m", "bigbatch", *words, str(runtime_folder), *hosts, *command],
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
    try:
        wait_for(lambda: re.search(r"step +5 ", said.read_text()) is not None, job, said)
        cut(cluster, 3)
        since = time.monotonic()
        wait_for(lambda: "rank 3 on n3 has not started it" in said.read_text(), job, said)
        named_seconds = time.monotonic() - since
        wait_for(lambda: "restarting with 3 of 4 ranks, from " in said.read_text(), job, said)
        wait_for(lambda: re.search(r"resumed after step \d+\n.*step +\d+ ", said.read_text()) is not None, job, said)
        stepping_seconds = time.monotonic() - since
        print(f"a node cut off: named after {named_seconds:.1f} s, stepping without it after {stepping_seconds:.1f} s")
        clusters.shape(cluster, rate=None, root=root, environ=os.environ)
        wait_for(
            lambda: re.search(r"restarting, from (?s:.*)4 ranks in 4 node", said.read_text()) is not None, job, said
        )
        steps = [int(step) for step in re.findall(r"resumed after step (\d+)", said.read_text())]
        assert steps == sorted(steps), "nothing was done twice that was saved"
    finally:
        job.terminate()
        job.wait(timeout=60)
        clusters.down(plan.name, root=root)
