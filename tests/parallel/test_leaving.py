"""How ranks of a user's own script leave: without close() or by an exception inside `with`."""

import re
from pathlib import Path

import pytest
from forked_ranks import start_scripts
from test_parallel import job_argv, needs_mpi, run_job

SCRIPT = Path(__file__).with_name("script_leaving.py")
weekly = (pytest.mark.long, pytest.mark.weekly)


def run_processes(*arguments: str) -> list[tuple[int, str]]:
    """Exit code and output of two ranks."""
    ranks = start_scripts([str(SCRIPT), *arguments], num_ranks=2)
    try:
        outputs = [rank.communicate(timeout=200)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, output) for rank, output in zip(ranks, outputs, strict=True)]


@pytest.mark.long
@pytest.mark.parametrize("backend", [pytest.param("tcp", marks=weekly), "gloo"])
def test_script_that_forgets_to_close_ends_well_and_in_silence(backend: str) -> None:
    assert run_processes("forgets", backend) == [(0, "rank 0: 2\n"), (0, "rank 1: 2\n")]


@pytest.mark.long
@needs_mpi
def test_script_that_forgets_to_close_is_no_failure_to_mpirun() -> None:
    argv = job_argv("mpirun", num_ranks=2, arguments=["forgets", "mpi"])
    argv[argv.index("forgets") - 1] = str(SCRIPT)
    code, output = run_job(argv, timeout_seconds=250)
    assert (code, sorted(output.split("\n"))) == (0, ["", "rank 0: 2", "rank 1: 2"])


@pytest.mark.long
def test_exception_inside_with_ends_the_other_ranks() -> None:
    (other, told), (own, shown) = run_processes("raises", "tcp")
    assert (own, other) == (1, 1)
    assert "ArithmeticError: rank 1 has a defect" in shown
    assert "no answer from rank 1" in told, told
    (waited,) = set(re.findall(r" failed after ([\d.]+) s; no answer from rank 1", told))
    assert float(waited) < 50, "the time limit of 60 s is not waited for"


@pytest.mark.long
@pytest.mark.parametrize("backend", ["tcp", pytest.param("gloo", marks=weekly)])
def test_exit_before_the_others_ends_them_and_is_named(backend: str) -> None:
    (other, told), (own, _) = run_processes("exits", backend)
    assert (own, other) == (1, 1)
    assert "rank 1 on " in told
    assert "before this operation" in told, "the time limit ends it in other words"


@pytest.mark.long
def test_exit_before_any_sum_is_named() -> None:
    """The ranks of a node share memory before their first sum."""
    (other, told), _ = run_processes("exits_first", "tcp")
    assert other == 1
    assert "CommError: rank 1 has closed its communicator, while rank 0 asks for " in told
