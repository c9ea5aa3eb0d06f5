"""What the launchers write, line by line against files; to write them again, run this file."""

import io
import re
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from bigbatch import __version__
from bigbatch.interpreter import python_argv
from bigbatch.launch.jobs.installed import find_mpirun
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers.mpirun import mpirun_argv
from bigbatch.launch.launchers.slurm_script import sbatch_script
from bigbatch.launch.start import main
from bigbatch.tools.emulate.state import state_root

ROOT = Path(__file__).resolve().parents[4]
GOLDEN = ROOT / "tests/golden"
TRAIN = ("--", "train", "--config", "quickstart")
SCRIPT = ("--python", "--", "my train.py", "--rate", "3")
UNEVEN = ("--ranks-per-node", "3,2,2,1")
NODES = ("--nodes", "4", "--ranks-per-node", "8")
POD_MOUNTS = ("--mount", "/data:/data:ro", "--mount", "runs-claim:/runs")
POD_TRAIN = (*TRAIN, "--data.root", "/data/shapes", "--run.directory", "/runs/quickstart")
POD_OPTIONS = (
    *(*NODES, "--name", "resnet50-32k", "--image", "registry.example/bigbatch:1", "--time", "90", *POD_MOUNTS),
    *("--exclude", "n3,n[10-12]", "--gpus-per-node", "8", "--cpus-per-rank", "12", "--memory", "400G"),
    *("--env", "NOTE=it's; $(here)", "--env", "TEXT=no", "--env", "NUMBER=1e3", "--env", "HEX=0x10", "--env", "TOKEN"),
    *("--env", "KEY@vision.wandb"),
    *("--interface", "eth0", "--stop-seconds", "300", "--restarts", "5"),
    *("--namespace", "vision", "--queue", "research"),
    *("--priority", "high", "--node-selector", "gpu=h200", "--node-selector", "example.org/fast=1"),
    *("--toleration", "nvidia.com/gpu:NoSchedule", "--toleration", "team=y", "--pull-secret", "registry"),
    *("--rdma", "rdma/hca_shared_devices_a"),
    *("--pod", 'annotation.k8s.v1.cni.cncf.io/networks=[{"name": "rdma-a"}]', "--pod", "label.team=vision"),
    *("--pod", "host-network", "--pod", "service-account=s3-reader", "--pod", "spread=kubernetes.io/hostname"),
    *("--pod", "runtime-class=nvidia", "--pod", "scheduler=bin-packing"),
)
CASES: dict[str, tuple[str, ...]] = {
    "slurm-minimal.sbatch": ("slurm", *TRAIN),
    "slurm-full.sbatch": (
        *("slurm", *NODES, "--name", "resnet50-32k", "--time", "1-12:30:00", "--partition", "gpu,spare"),
        *("--account", "vision", "--qos", "high", "--reservation", "window", "--constraint", "a100&nvlink"),
        *("--exclude", "n3,n[10-12]", "--gpus-per-node", "a100:8", "--cpus-per-rank", "12", "--memory", "400G"),
        *("--sbatch", "exclusive", "--sbatch", "dependency=afterok:12?afterany:13", "--mpi", "none"),
        *("--env", "NCCL_DEBUG=INFO", "--env", "NOTE=it's; $(here)", "--module", "cuda/13.0", "--module", "gcc"),
        *("--interface", "ib0", "--logs", "/scratch/logs", "--stop-seconds", "300"),
        *("--", "train", "--config", "imagenet/resnet50_32k", "--run.directory", "runs/a b"),
    ),
    "slurm-preflight-warn.sbatch": ("slurm", "--nodes", "2", "--preflight", "warn", *TRAIN),
    "slurm-preflight-exclude.sbatch": ("slurm", "--nodes", "2", "--preflight", "exclude", *TRAIN),
    "slurm-restarts.sbatch": ("slurm", "--nodes", "2", "--restarts", "2", *TRAIN),
    "slurm-heal.sbatch": ("slurm", "--nodes", "2", *TRAIN, "--run.heal", "in_place"),
    "slurm-array.sbatch": (
        *("slurm", "--array", "0-7%2", *TRAIN, "--run.seed", "{index}", "--run.directory", "runs/seeds/{index}"),
    ),
    "slurm-pyxis.sbatch": (
        *("slurm", *NODES, "--image", "registry.example/team/bigbatch:1", "--mount", "/data:/data:ro", *TRAIN),
    ),
    "slurm-apptainer.sbatch": ("slurm", *NODES, "--image", "bigbatch.sif", "--mount", "/data:/data", *TRAIN),
    "slurm-python.sbatch": ("slurm", "--nodes", "2", "--preflight", "stop", *SCRIPT),
    "slurm-python-image.sbatch": ("slurm", "--array", "0-7", "--image", "bigbatch.sif", *SCRIPT, "{index}"),
    "k8s-python.yaml": ("k8s", "--image", "registry.example/bigbatch:1", *SCRIPT),
    "torchrun-python.txt": ("torchrun", "--ranks", "2", *SCRIPT),
    "local-python.txt": ("local", "--ranks", "2", "--python", "--", "-m", "my.train", "--rate", "3"),
    "k8s-minimal.yaml": ("k8s", "--image", "registry.example/bigbatch:1", *POD_MOUNTS, *POD_TRAIN),
    "k8s-heal.yaml": (
        *("k8s", "--nodes", "2", "--image", "registry.example/bigbatch:1", *POD_MOUNTS, *POD_TRAIN),
        *("--run.heal", "in_place"),
    ),
    "k8s-full.yaml": ("k8s", *POD_OPTIONS, "--user", "5000:6000", *POD_TRAIN),
    "torchrun.txt": ("torchrun", "--ranks", "4", "--env", "NOTE=it's; $(here)", *TRAIN),
    "torchrun-nodes.txt": (
        *("torchrun", "--nodes", "2", "--ranks-per-node", "2", "--node-rank", "1", "--master", "n0:29500"),
        *("--interface", "eth0", *TRAIN),
    ),
    "flux.txt": (
        *("flux", *NODES, "--gpus-per-node", "8", "--cpus-per-rank", "12", "--time", "90", "--partition", "pbatch"),
        *("--account", "vision", "--constraint", "a100|h100", "--exclude", "n3,n[10-12]", "--name", "resnet50"),
        *("--stop-seconds", "300", "--env", "NOTE=it's; $(here)", "--", "train", "--config", "imagenet/resnet50_32k"),
    ),
    "flux-python.txt": ("flux", "--nodes", "2", *SCRIPT),
    "local.txt": ("local", "--ranks", "2", *TRAIN),
    "emulate-up.txt": ("emulate", "up", "--nodes", "2", "--delay", "500us"),
    "emulate-slurm.txt": ("emulate", "up", "--ranks-per-node", "3,1", "--link", "1gbit", "--slurm"),
    "emulate-torchrun.txt": ("emulate", "run", *UNEVEN, "--launcher", "torchrun", *SCRIPT, "--", "a b"),
    "emulate-plain.txt": ("emulate", "run", *UNEVEN, "--launcher", "plain", "--place", "cyclic", "--", "comm", "bench"),
}


MPI_VARIABLES = (
    *("NCCL_DEBUG", "NCCL_ALGO", "HOME", "PATH", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES", "FI_PROVIDER"),
    *("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCHINDUCTOR_CACHE_DIR"),  # the last one is a folder of this host
)


def dry_run(words: tuple[str, ...]) -> str:
    """What `bigbatch launch` prints, with stand-ins for this Python's path, and for the port on this host."""
    output = io.StringIO()
    with redirect_stdout(output):
        at = 2 if words[0] == "emulate" else 1
        assert main([*words[:at], "--dry-run", *words[at:]]) == 0
    # drawn again: a name's end, and a port that was free
    text = re.sub(r"(bigbatch|resnet50-32k)-[a-z0-9]{5}(?=$|[ .:'-])", r"\1-DRAWN", output.getvalue(), flags=re.M)
    text = re.sub(r"(MASTER_PORT|(127\.0\.0|10\.77\.0)\.1 --master-port)=\d+", r"\1=PORT", text)
    text = re.sub(r"(resnet50-32k-DRAWN):\d+", r"\1:PORT", text)  # by its drawn name, in the nodes' network
    # those of this process
    text = re.sub(rf"{re.escape(str(state_root()))}/(run-\d+|box)", "CLUSTER", text)
    text = re.sub(rf"(bigbatch:? ){re.escape(__version__)}", r"\1VERSION", text)
    return text.replace(" ".join(python_argv()), "PYTHON").replace(sys.executable, "PYTHON")


def mpirun_lines(command: tuple[str, ...] = TRAIN[1:], *, is_python: bool = False) -> str:
    """One word per line; independent of this machine's user, cores and variables."""
    job = JobSpec(
        command,
        16,
        is_python=is_python,
        hosts=(("n0", 8), ("n1", 8)),
        interface="eth0",
        environment=(("NOTE", "it's; $(here)"), ("NCCL_DEBUG", "INFO")),
    )
    words = mpirun_argv(job, variables=MPI_VARIABLES)
    return "\n".join(words).replace(sys.executable, "PYTHON") + "\n"


def ready_script() -> str:
    """launch/scripts/train.sbatch: a generated script, for users without the launcher."""
    command = ("train", "--config", "imagenet/resnet50_8k")
    job = JobSpec(command, 16, num_nodes=2, gpus_per_node=8, cpus_per_rank=8, minutes=240)
    return sbatch_script(job, folder="runs/resnet50_8k")


FILES = {
    **{GOLDEN / name: lambda words=words: dry_run(words) for name, words in CASES.items()},
    GOLDEN / "mpirun.txt": mpirun_lines,
    GOLDEN / "mpirun-python.txt": lambda: mpirun_lines(SCRIPT[2:], is_python=True),
    ROOT / "launch/scripts/train.sbatch": ready_script,
}

SCRIPTS = [*GOLDEN.glob("*.sbatch"), *(ROOT / "launch/scripts").iterdir(), *(ROOT / "docs").glob("*.md")]
"""Scripts that the project writes or shows, and pages that may show one."""

FOREIGN_OPTIONS = {GOLDEN / name for name in ("defaults.yaml", "k8s-fields.yaml", "report.json", "report.md")}
"""What other tests compare with: a config's defaults, the fields that a JobSet and an MPIJob may have, a report."""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_golden_file_is_what_the_launcher_writes(path: Path) -> None:
    assert FILES[path]().splitlines() == path.read_text().splitlines()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_every_script_passes_its_cores_on_to_srun(path: Path) -> None:
    """Slurm 22.05 to 23.02 do not: each rank would decode its images on one core."""
    blocks = (
        re.findall(r"^```\w*\n(.*?)^```", path.read_text(), re.M | re.S) if path.suffix == ".md" else [path.read_text()]
    )
    for block in blocks:
        if re.search(r"^#SBATCH .*--cpus-per-task", block, re.M):
            starts = re.findall(r"^srun .*(?:\\\n.*)*", block, re.M)
            assert starts
            assert [start for start in starts if "--cpus-per-task" not in start] == []


def test_golden_files_all_have_a_case() -> None:
    assert set(GOLDEN.iterdir()) == {path for path in FILES if path.parent == GOLDEN} | FOREIGN_OPTIONS


def test_mpirun_is_printed_for_this_machine() -> None:
    mpirun = find_mpirun().replace(sys.executable, "PYTHON")
    assert dry_run(("mpirun", "--ranks", "2", *TRAIN)).startswith(f"env PYTHONSAFEPATH=1 {mpirun} -n 2 --stdin none")


if __name__ == "__main__":
    for path, make in FILES.items():
        path.write_text(make())
