"""The checks of ranks.py: by hand over hosts that the ranks only play, and under a real mpirun and torchrun."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from forked_ranks import clean_environ, exit_codes, places, start_rank
from ranks_contract import PLAYED_NCCL, check_contract
from thread_ranks import run_over_played_nccl

from bigbatch.launch.jobs.installed import find_mpirun
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers.mpirun import mpirun_argv
from bigbatch.launch.launchers.torchrun import torchrun_argv

HOSTS = ("a", "a,a,b,b,c", "a,b,a,b,a,b")
"""Worlds of 1 to 6, of equal nodes and of unequal ones."""
RANKS = Path(__file__).with_name("ranks.py")
SUPPORT = Path(__file__).parents[1] / "support"
"""What ranks.py imports lies there, which pytest's processes have on their path and a launcher's do not."""


needs_mpi = pytest.mark.skipif(
    shutil.which(find_mpirun()) is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun and mpi4py: pip install -e '.[mpi]'",
)


def job_argv(launcher: str, *, num_ranks: int, arguments: list[str]) -> list[str]:
    """The launcher's command line as `bigbatch launch` builds it, with ranks.py in place of bigbatch."""
    words = (str(RANKS), *arguments)
    job = JobSpec(words, num_ranks, oversubscribe=num_ranks > 1, is_python=True)
    if launcher == "mpirun":
        return mpirun_argv(job, mpirun=find_mpirun(), is_root=os.geteuid() == 0)
    return torchrun_argv(job)


def run_job(argv: list[str], *, timeout_seconds: float) -> tuple[int, str]:
    """Exit code and all output; a job that hangs is ended with all its processes, and fails the test."""
    environ = clean_environ() | {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONPATH": str(SUPPORT)}
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


def run_forked(num_ranks: int, arguments: Sequence[str], *, target: str = "ranks:main") -> str:
    """The output of a job without a launcher, after it has ended well."""
    code, output = fork_job(target, arguments, places(num_ranks), timeout_seconds=250)
    if code != 0:
        pytest.fail(f"{' '.join(arguments)} ended with {code}:\n{output}", pytrace=False)
    return output


def fork_job(
    target: str, arguments: Sequence[str], environs: Sequence[Mapping[str, str]], *, timeout_seconds: float
) -> tuple[int, str]:
    """Exit code and all output of ranks with these variables; one that hangs is killed, and fails the test."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "output"
        ranks = [start_rank(target, arguments, environ=environ, stdout=log, stderr=log) for environ in environs]
        codes = exit_codes(ranks, timeout_seconds=timeout_seconds)
        output = log.read_text()
    if codes is None:
        pytest.fail(f"the job did not end within {timeout_seconds} s; its output:\n{output}", pytrace=False)
    return next((code for code in codes if code), 0), output


def run_to_the_end(argv: list[str], *, timeout_seconds: float = 150) -> str:
    """A job's output; the test fails where the job does."""
    code, output = run_job(argv, timeout_seconds=timeout_seconds)
    if code != 0:
        pytest.fail(f"{' '.join(argv)} ended with {code}:\n{output}", pytrace=False)
    return output


def assert_all_passed(output: str, *, num_ranks: int) -> None:
    """Every rank says so."""
    for rank in range(num_ranks):
        assert f"rank {rank}: all checks passed" in output


long = pytest.mark.long


@pytest.mark.parametrize(
    ("hosts", "group_size", "backends"),
    [
        ("a,a", 0, "tcp gloo"),
        pytest.param("a,b,a,b,a", 0, "tcp gloo", marks=[long, pytest.mark.weekly]),
        pytest.param("a,a,a,b,b", 2, "tcp", marks=long),
        pytest.param("a,a,b,b,c,c,d,d", 0, "tcp", marks=[long, pytest.mark.weekly]),
        # by threads in other worlds, below; here that processes find the same, and traces
        pytest.param("a,b,a", 0, PLAYED_NCCL, marks=long),
    ],
)
def test_backend_contract(hosts: str, group_size: int, backends: str) -> None:
    num_ranks = len(hosts.split(","))
    output = run_forked(num_ranks, ["check", hosts, str(group_size), *backends.split()])
    assert_all_passed(output, num_ranks=num_ranks)


@pytest.mark.parametrize(
    "hosts", [pytest.param(each, marks=[long, pytest.mark.weekly] if each.count(",") == 5 else []) for each in HOSTS]
)
def test_contract_by_threads_over_gloo_that_plays_nccl(hosts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = partial(check_contract, longest=7, records=False)
    played = run_over_played_nccl(check, hosts.split(","), monkeypatch=monkeypatch)
    num_ranks = len(hosts.split(","))
    assert played.of("init") == [torch.device("cuda", 0)] * num_ranks, "NCCL is connected before it is used"
    assert played.of("new") == []


@needs_mpi
@long
def test_backend_contract_under_mpirun() -> None:
    argv = job_argv("mpirun", num_ranks=3, arguments=["check", "a,b,a", "0", "mpi"])
    assert_all_passed(run_to_the_end(argv, timeout_seconds=250), num_ranks=3)


@pytest.mark.parametrize(
    ("num_ranks", "mode", "backend"),
    [
        pytest.param(3, "sharded", "tcp", marks=long),
        (2, "divided", "tcp"),
        pytest.param(3, "divided", "gloo", marks=long),
        (2, "behind-forward", "tcp"),
        pytest.param(3, "behind-forward", "gloo", marks=long),
        (3, "beside", "gloo"),
    ],
)
def test_update_that_ranks_share_out_and_a_process_group_beside(num_ranks: int, mode: str, backend: str) -> None:
    assert_all_passed(run_forked(num_ranks, [mode, backend]), num_ranks=num_ranks)


def test_ranks_of_a_process_group_without_a_launcher(tmp_path: Path) -> None:
    """MASTER_ADDR and MASTER_PORT, which scripts set for init_process_group, say nothing of ranks."""
    variables = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    environs = [{"SPAWNED_AS": str(rank), **variables} for rank in range(2)]
    code, output = fork_job("ranks:main", ["spawned", str(tmp_path)], environs, timeout_seconds=250)
    assert code == 0, output
    assert_all_passed(output, num_ranks=2)


def test_connect_one_after_another() -> None:
    assert_all_passed(run_forked(2, ["reconnect", "tcp", "gloo", "tcp", "gloo"]), num_ranks=2)


@pytest.mark.parametrize(
    ("hosts", "backend", "algorithm", "other"),
    [
        ("a,a", "tcp", "hierarchical", "metric:20"),
        ("a,b", "tcp", "ring", "metric:20"),
        ("a,b", "gloo", "native", "metric:20"),
        ("a,b", "gloo", "native", "buffer 0:10"),
    ],
)
def test_ranks_that_sum_different_tensors(hosts: str, backend: str, algorithm: str, other: str) -> None:
    """By name, or by size: without a check two sums of one size are mixed, and others hang over gloo."""
    output = run_forked(2, ["mismatch", hosts, backend, algorithm, "buffer 0:20", other])
    require_both_named(output, backend, other)


def require_both_named(output: str, backend: str, other: str) -> None:
    """Each rank fails, and at least one names both operations."""
    pattern = rf"rank (\d) failed: rank \1: [\w ]+ failed after \d+\.\d s; all ranks still .*\({backend}: (.*)"
    found = dict(re.findall(pattern, output))
    assert found.keys() == {"0", "1"}, output
    runs = {
        rank: f"rank {rank} runs operation [23] \\({text.replace(':', ', ')} of float32\\)"
        for rank, text in (("0", "buffer 0:20"), ("1", other))
    }
    ways = [re.match(f"{runs[peer]}, while {runs[rank]}: ", found[rank]) for rank, peer in ("01", "10")]
    assert any(ways), output


@needs_mpi
@pytest.mark.long
def test_mpi_job_is_ended_by_a_stalled_rank_that_is_named() -> None:
    argv = job_argv("mpirun", num_ranks=2, arguments=["stall"])
    code, output = run_job(argv, timeout_seconds=120)  # rank 1 sleeps for longer
    assert code != 0
    expected = r"PeerLostError: rank 0: buffer 0 .* \d+\.\d s; .*rank 1 on \S+ \(mpi: "
    assert re.search(expected, output), output
