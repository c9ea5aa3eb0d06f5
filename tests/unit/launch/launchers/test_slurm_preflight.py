"""What a job's script makes of its preflight, run by the real bash with stand-ins for Slurm."""

import signal
from pathlib import Path

import pytest
from slurm_stubs import JOB, Stubs

from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers.slurm_preflight import MAX_EXCLUSIONS
from bigbatch.launch.launchers.slurm_script import sbatch_script

SRUN = """#!/bin/sh
echo "$@" >> "$STUBS/srun.calls"
echo $$ > "$STUBS/srun.pid"
case " $* " in
  *" preflight "*)
    for last; do :; done
    printf "$BAD" > "$last"
    until [ -z "$STUB_SAVES" ] || [ -e "$STUBS/signalled" ]; do /bin/sleep 0.05; done
    exit "$FIT" ;;
esac
"""


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    stubs = Stubs(tmp_path)
    (tmp_path / "srun").write_text(SRUN)
    return stubs


def look(
    stubs: Stubs, choice: str, *signals: signal.Signals, fit: int, bad: str = "", restarts: int = 0
) -> tuple[int, str]:
    """Exit code and output of a job; signals come while it looks."""
    script = sbatch_script(JobSpec(("train", "--config", "quickstart"), 2, preflight=choice))
    variables = {"FIT": str(fit), "BAD": bad, "SLURM_RESTART_COUNT": str(restarts)}
    return stubs.run(script, *signals, **variables)


def calls(stubs: Stubs, program: str, word: str) -> int:
    """Return the number of calls of a program with that word."""
    path = stubs.folder / f"{program}.calls"
    return sum(word in line.split() for line in path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize(
    ("choice", "fit", "number"),
    [("exclude", 4, signal.SIGUSR2), ("stop", 4, signal.SIGTERM), ("warn", 0, signal.SIGUSR2)],
)
def test_slurm_checks_end_a_job_that_is_cancelled_while_it_looks(
    stubs: Stubs, choice: str, fit: int, number: signal.Signals
) -> None:
    code, output = look(stubs, choice, number, fit=fit, bad="n1\\n")
    assert code == 130
    assert output.endswith(" ended before training started, as it was asked to stop\n")
    assert calls(stubs, "srun", "train") == 0
    assert calls(stubs, "scontrol", "requeuehold") == 0


@pytest.mark.parametrize(("fit", "code", "starts"), [(0, 0, 1), (4, 4, 0), (1, 0, 1)])
def test_slurm_tests_gpus_by_default(stubs: Stubs, fit: int, code: int, starts: int) -> None:
    """Only a finding ends the job: another failure of the test is the job's own, too."""
    job = JobSpec(("train", "--config", "quickstart"), 2, num_nodes=2, gpus_per_node=1)
    found, output = stubs.run(sbatch_script(job), FIT=str(fit), BAD="")
    assert (found, calls(stubs, "srun", "--short"), calls(stubs, "srun", "train")) == (code, 1, starts)
    assert ("ended before training started: preflight ended with exit code 4" in output) == (fit == 4)


def test_slurm_checks_change_the_nodes_of_a_job_near_its_time_limit(stubs: Stubs) -> None:
    assert look(stubs, "exclude", signal.SIGUSR1, fit=4, bad="n1\\n")[0] == 4
    assert calls(stubs, "scontrol", "ExcNodeList=n1") == 1


def test_slurm_checks_count_exclusions_and_no_other_restarts(stubs: Stubs) -> None:
    for done in range(1, MAX_EXCLUSIONS + 1):
        code, output = look(stubs, "exclude", fit=4, bad=f"n{done}\\nm{done}\\n", restarts=9)
        assert code == 4
        assert f"requeuing, to run without n{done},m{done}\n" in output
        assert calls(stubs, "scontrol", "requeuehold") == done
    code, output = look(stubs, "exclude", fit=4, bad="n9\\n", restarts=9)
    assert code == 4
    assert output.endswith(" ended before training started: preflight ended with exit code 4\n")
    assert calls(stubs, "scontrol", "requeuehold") == MAX_EXCLUSIONS == 3
    assert calls(stubs, "srun", "train") == 0
    excluded = (stubs.folder / f"logs/bigbatch-{JOB}/excluded").read_text()
    assert excluded == "n1,m1\nn2,m2\nn3,m3\n"
