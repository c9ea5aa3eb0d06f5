"""The short preflight before a job: played driver and /sys, and what mpirun and a Slurm job make of its findings."""

import os
import socket
import sys
from pathlib import Path

import pytest
from host_tree import add_gpu_on_bus, add_limits, add_port, write

from bigbatch.cli import main
from bigbatch.launch.jobs.fit_hosts import short_preflight_of
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers import mpirun
from bigbatch.launch.launchers.slurm_script import sbatch_script
from bigbatch.tools.preflight import facts, short

TRAIN = ("train", "--config", "quickstart")
SMI = """#!/bin/sh
[ -z "$HANGS" ] || exec sleep 30
case "$1" in
  --query-gpu=name*) printf 'H100, %s, 1980, 1980, 40\\nH100, %s, 1980, 1980, 40\\n' "$DRIVER" "$DRIVER" ;;
  --query-gpu=uuid*) printf 'GPU-a, 16, 16, %s, %s\\nGPU-b, 16, 16, 0, Disabled\\n' "$ECC" "$MIG" ;;
  --query-compute-apps*) [ -z "$OTHER" ] || echo "$OTHER, GPU-a" ;;
esac
"""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with two healthy GPUs and a port of InfiniBand, whose driver is a script."""
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    for name, value in {"DRIVER": "580.10", "ECC": "0", "MIG": "Disabled", "OTHER": "", "HANGS": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(facts, "torch_cuda", lambda: "12.6")
    root = tmp_path / "root"
    for address in ("0000:3b:00.0", "0000:3c:00.0"):
        add_gpu_on_bus(root, address)
    add_port(root, "mlx5_0/1")
    add_limits(root, locked=1 << 40)
    write(root, "dev/infiniband/uverbs0", "")
    return root


def find(root: Path, *, world_size: int = 4, visible: str | None = None) -> list[str]:
    return short.find(num_ranks=2, world_size=world_size, visible=visible, root=root)


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({}, None),
        ({"ECC": "3"}, "GPU-a: 3 uncorrected memory errors: have its administrator reset the GPU"),
        ({"MIG": "Enabled"}, "GPU-a: MIG is enabled: have it turned off"),
        ({"OTHER": "11"}, "process 11, which is not of this job, uses GPU-a: end it"),
        ({"DRIVER": "520.61.05"}, "driver 520.61.05 is below 525, which torch's build for CUDA 12.6 needs: update"),
        ({"HANGS": "1"}, "nvidia-smi: no answer within 0.5 s: see nvidia-smi there"),
    ],
)
def test_driver_of_a_node(
    variables: dict[str, str], told: str | None, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tree, "proc/11/comm", "python")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if "HANGS" in variables:
        monkeypatch.setattr(short, "SECONDS", 0.5)
    found = find(tree)
    assert len(found) == bool(told)
    assert told is None or told in found[0]


def test_rdma_of_a_node(tree: Path) -> None:
    add_limits(tree, locked=65536)
    assert "a rank may lock 64 KiB" in find(tree)[0]
    assert find(tree, world_size=2) == [], "NCCL needs no port on one node"
    add_limits(tree, locked=1 << 40)
    (tree / "dev/infiniband/uverbs0").unlink()
    (found,) = find(tree)
    assert "1 RDMA port, and no device in /dev/infiniband" in found
    add_port(tree, "mlx5_0/1", state="1: DOWN", physical="3: Disabled")
    assert "no InfiniBand or RoCE port carries data" in find(tree)[0]


def test_rail_that_is_down(tree: Path) -> None:
    """Without a second node to compare with: three ports cannot serve four GPUs evenly, and four could."""
    for number in (2, 3):
        add_gpu_on_bus(tree, f"0000:5{number}:00.0")
        add_port(tree, f"mlx5_{number}/1")
    add_port(tree, "mlx5_1/1", state="1: DOWN", physical="2: Polling")
    (found,) = short.find(num_ranks=4, world_size=8, visible=None, root=tree)
    assert "mlx5_1/1 is DOWN (Polling): 3 ports for 4 GPUs, which 4 would serve evenly: look at its cable" in found
    assert short.find(num_ranks=4, world_size=4, visible=None, root=tree) == [], "NCCL needs no port on one node"


def test_facts_that_cannot_be_read_are_no_finding(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECC", "[N/A]")
    assert find(tree) == []
    monkeypatch.setenv("ECC", "3")
    for hidden in ("", "-1"):
        assert find(tree, visible=hidden) == [], "the ranks see no GPU"
    assert find(tree, visible="1") == [], "another GPU's errors"
    assert len(find(tree, visible="GPU-a")) == 1
    (tree.parent / "nvidia-smi").write_text("#!/bin/sh\necho couldn't communicate with the driver\nexit 9\n")
    assert find(tree) == [], "no driver is loaded"
    (tree.parent / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(tree.parent))
    assert find(tree) == []


def test_ranks_take_the_first_visible_gpus() -> None:
    uuids = ("GPU-a", "GPU-b", "GPU-c")
    assert short.own_gpus(uuids, visible=None, num_ranks=2) == ("GPU-a", "GPU-b")
    assert short.own_gpus(uuids, visible="2,0,1", num_ranks=2) == ("GPU-c", "GPU-a")
    assert short.own_gpus(uuids, visible="GPU-c,7", num_ranks=2) == ("GPU-c",)


def test_line_names_host_finding_and_remedy(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(short, "find", lambda *_, **__: ["GPU-a: MIG is enabled: have it turned off"])
    assert main(["preflight", "--short", "--ranks", "4", "--ranks-per-node", "2"]) == 4
    line = f"bigbatch: {socket.gethostname()}: GPU-a: MIG is enabled: have it turned off; --preflight off starts"
    assert capsys.readouterr().out.startswith(line)


@pytest.mark.parametrize(
    ("hosts", "num_ranks", "tested", "per_node"),
    [
        ((("n0", 8), ("n1", 8)), 16, (("n0", 1), ("n1", 1)), "8"),
        ((("n0", 8), ("n1", 8)), 12, (("n0", 1), ("n1", 1)), "4"),
        ((("n0", 8), ("n1", 8)), 8, (("n0", 1),), "8"),
        ((), 2, (), "2"),
    ],
)
def test_each_host_is_tested_by_one_process(
    hosts: tuple[tuple[str, int], ...], num_ranks: int, tested: tuple[tuple[str, int], ...], per_node: str
) -> None:
    job = short_preflight_of(JobSpec(TRAIN, num_ranks, hosts=hosts))
    assert job is not None
    assert (job.hosts, job.num_ranks) == (tested, max(1, len(tested)))
    assert job.command == ("preflight", "--short", "--ranks", str(num_ranks), "--ranks-per-node", per_node)


def test_jobs_without_the_test() -> None:
    assert short_preflight_of(JobSpec(TRAIN, 2, preflight="off")) is None
    assert short_preflight_of(JobSpec(TRAIN, 2, device="cpu")) is None
    assert short_preflight_of(JobSpec(("preflight",), 2)) is None


@pytest.mark.parametrize(("code", "result", "starts"), [(0, 0, 2), (4, 4, 1), (1, 0, 2)])
def test_mpirun_tests_hosts_before_the_command(
    code: int, result: int, starts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "mpirun"
    program.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\ncase "$*" in *" --short "*) exit {code} ;; esac\n')
    program.chmod(0o755)
    (tmp_path / "own.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: str(program))
    assert main(["launch", "mpirun", "--hosts", "n0:2,n1:2", "--python", "--", "own.py"]) == result
    tested, *others = (tmp_path / "calls").read_text().splitlines()
    assert len(others) == starts - 1
    assert "-n 2 " in tested
    assert "--host n0:1,n1:1 " in tested
    assert tested.endswith("-m bigbatch preflight --short --ranks 4 --ranks-per-node 2")


def test_mpirun_on_this_host_starts_no_process_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(short, "find", lambda *_, **__: ["MIG is enabled: have it turned off"])
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: sys.executable)
    monkeypatch.setattr(mpirun, "may_have_gpus", lambda: True)
    assert main(["launch", "mpirun", "--ranks", "2", "--", *TRAIN, "--run.directory", str(tmp_path)]) == 4
    assert "MIG is enabled" in capsys.readouterr().out
    assert main(["launch", "mpirun", "--ranks", "2", "--dry-run", "--", *TRAIN]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_mpirun_dry_run_shows_the_test_of_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "mpirun", "--hosts", "n0:2,n1:2", "--dry-run"]
    assert main([*words, "--", *TRAIN]) == 0
    tested, started = capsys.readouterr().out.splitlines()
    assert (" preflight --short " in tested, started.endswith(" train --config quickstart")) == (True, True)
    assert main([*words, "--preflight", "off", "--", *TRAIN]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_slurm_tests_nodes_with_gpus() -> None:
    job = {"num_nodes": 2, "gpus_per_node": 8}
    script = sbatch_script(JobSpec(TRAIN, 16, **job))  # type: ignore[arg-type]
    assert "--nodes=2 --ntasks=2 --ntasks-per-node=1 \\\n  bigbatch preflight --short --ranks 16" in script
    assert 'if [ "$fit" -eq 4 ]' in script
    assert "--short" not in sbatch_script(JobSpec(TRAIN, 16, **job, preflight="off"))  # type: ignore[arg-type]
    assert "--short" not in sbatch_script(JobSpec(TRAIN, 16, num_nodes=2)), "no GPUs are requested"


@pytest.mark.slow
@pytest.mark.parametrize(("errors", "code"), [("0", 0), ("3", 4)])
def test_real_mpirun_ends_before_the_command(
    errors: str,
    code: int,
    tree: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The driver is played, on this host as mpirun's only one; its answers name the finding."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)  # tests hide GPUs
    monkeypatch.setenv("DRIVER", "999.1")  # new enough for the torch of this machine
    monkeypatch.setenv("ECC", errors)
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("open('started', 'w').close()\n")
    assert main(["launch", "mpirun", "--hosts", "localhost:1", "--python", "--", "own.py"]) == code
    assert Path("started").exists() == (code == 0)
    told = capfd.readouterr()
    assert ("GPU-a: 3 uncorrected memory errors: have its administrator" in told.out + told.err) == (code == 4)
