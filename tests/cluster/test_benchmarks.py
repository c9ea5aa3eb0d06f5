"""The benchmarks of comm as jobs across emulated nodes: tiny, to see that they run, agree and can be summarised."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmark_process import run_benchmark

from bigbatch.tools.emulate import cluster as clusters
from bigbatch.tools.emulate.plan import make_plan
from bigbatch.tools.emulate.state import EmulatedCluster, state_root
from tests.cluster.conftest import Emulate

SETTING = {"ranks_per_node": "1,1", "link": "1gbit", "delay": "0", "place": "block"}
TUNED = ("--tune-seconds", "1")
PROGRAMS = {  # module: options
    "gradients": (*TUNED, "--model", "resnet9", "--contestants", "ours tuned,ours fp16,ours,ddp"),
    "scaling": (
        *(*TUNED, "--model", "resnet9", "--image-size", "32", "--weak", "0.3", "--strong", "0.4"),
        *("--contestants", "ours tuned,ddp,local"),
    ),
}


@pytest.fixture(scope="module")
def pair(runtime_folder: Path) -> Iterator[EmulatedCluster]:
    """Two nodes with one rank at 1 Gbit/s."""
    root = state_root(os.environ)
    plan = make_plan(name="pair", nodes=2, ranks_per_node="1", link="1gbit", delay="0")
    yield clusters.up(plan, root=root, environ=os.environ)
    clusters.down("pair", root=root)


def test_benchmarks_of_comm_run_and_are_summarised(emulate: Emulate, pair: EmulatedCluster, tmp_path: Path) -> None:
    """The goodput is given, so that no iperf3 is needed; Horovod takes no part."""
    common = ("--repetitions", "1", "--goodput-mbit", "956", "--setting", json.dumps(SETTING))
    for module, options in PROGRAMS.items():
        out = ("--out", str(tmp_path / f"comm-{module}.json"))
        job = ("-m", f"benchmarks.comm.{module}", *out, *common, *options)
        done = emulate("run", "--name", "pair", "--launcher", "plain", "--python", "--", *job)
        assert done.returncode == 0, done.stdout + done.stderr
    records = {path.stem: json.loads(path.read_text()) for path in tmp_path.glob("comm-*.json")}
    ddp = next(row for row in records["comm-gradients"]["rows"] if row["contestant"] == "ddp")
    assert 1 < ddp["node_bytes"] / records["comm-gradients"]["num_bytes"] < 1.1  # 2(m-1)/m = 1 for two nodes; headers
    text = run_benchmark("comm.summary", tmp_path, check=True, timeout=60).stdout
    assert {row["num_wrong"] for row in records["comm-gradients"]["rows"]} == {0}
    scaling = records["comm-scaling"]
    rows = {(row["scaling"], row["contestant"]): row for row in scaling["rows"]}
    assert rows.keys() == {(mode, name) for mode in ("weak", "strong") for name in ("ours tuned", "ddp", "local")}
    assert (rows["weak", "ddp"]["compute_seconds"], rows["strong", "ddp"]["compute_seconds"]) == (0.3, 0.2)
    assert all(row["seconds"]["median"] >= row["compute_seconds"] for row in scaling["rows"])
    assert set(scaling["num_wrong"].values()) == {0}
    for heading in ("## gradients", "## scaling"):
        assert heading in text


def test_effective_time_of_a_job_that_is_struck(tmp_path: Path) -> None:
    """Ours, healing, with one failure after 1.9 s; figures are asked of a machine that does nothing else."""
    out, plot = tmp_path / "out.json", tmp_path / "plot.png"
    times = ("--seconds", 8, "--mean-seconds", 4, "--seed", 41, "--image-size", 32, "--often-steps", 5)
    done = run_benchmark("faults.effective", "healing", *times, "--out", out, "--plot", plot)
    assert done.returncode == 0, done.stdout + done.stderr
    way = json.loads(out.read_text())["ways"]["healing"]
    assert (way["failures"], way["cost_seconds"]["n"]) == (1, 1)
    assert 0 < way["effective_share"] < 1
    assert plot.stat().st_size > 0


def test_trial_of_healing(tmp_path: Path) -> None:
    """One killed rank; the last bits are those of the undisturbed run."""
    out = tmp_path / "out.json"
    done = run_benchmark("faults.healing", "--trials", 1, "--layout", "2x2", "--timeout-seconds", 60, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["layouts"]["2x2"]
    assert (found["n"], found["healed"], found["equal"], found["steps_lost"]) == (1, 1, 1, 0)
    assert found["max_seconds"] == found["trials"][0]["seconds"]
