"""Jobs for PBS: what is refused before qsub is asked, what it gets, and what it says."""

import os
import stat
from pathlib import Path

import pytest
from error_texts import naming

from bigbatch.errors import JobRefused, SchedulerError
from bigbatch.launch.start import main

TRAIN = ("--", "train", "--config", "quickstart")
QSUB = """#!/bin/sh
echo "$*" >> qsub.calls
cat > qsub.input
echo 'Welcome to Big!'
{said}
echo 'half of the nodes are down' >&2
exit {code}
"""


@pytest.fixture
def login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on a host with a qsub that takes jobs."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    answer(tmp_path)
    return tmp_path


def answer(folder: Path, *, said: str = "echo 1234.server", code: int = 0) -> None:
    (folder / "qsub").write_text(QSUB.format(said=said, code=code))
    (folder / "qsub").chmod(0o755)


def test_pbs_submits_what_dry_run_prints(login: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pbs", "--dry-run", *TRAIN]) == 0
    printed = capsys.readouterr().out
    assert main(["pbs", *TRAIN]) == 0
    assert (login / "qsub.input").read_text() == printed
    assert (login / "qsub.calls").read_text() == "\n"
    assert (login / "logs").is_dir(), "PBS makes none"
    said = capsys.readouterr()
    assert said.out.splitlines() == [
        "job 1234.server; its output: logs/bigbatch-1234.log",
        "  qstat 1234.server",
        "  qsig -s USR1 1234.server",
    ]
    assert said.err.splitlines() == ["Welcome to Big!", "half of the nodes are down"]


@pytest.mark.usefixtures("login")
def test_pbs_script_that_is_kept_is_its_owners_alone_and_not_submitted(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--env", "NOTE=secret", "--logs", "out")
    assert main(["pbs", *words, "--output", "job.pbs", *TRAIN]) == 0
    assert capsys.readouterr().out == "written: job.pbs; submit it by: mkdir -p out && qsub job.pbs\n"
    assert stat.S_IMODE(Path("job.pbs").stat().st_mode) == 0o600
    assert not Path("qsub.calls").exists()
    with pytest.raises(JobRefused, match=naming("--output job.pbs", "--force")):
        main(["pbs", "--output", "job.pbs", *TRAIN])


def test_pbs_wait_ends_with_the_exit_code_of_the_job(login: Path) -> None:
    answer(login, code=3)
    assert main(["pbs", "--wait", *TRAIN]) == 3
    assert (login / "qsub.calls").read_text() == "-W block=true\n"


def test_pbs_refusal_is_told_in_its_own_words(login: Path) -> None:
    answer(login, said="", code=1)
    with pytest.raises(SchedulerError, match=naming("qsub refused the job", "half of the nodes are down", "qstat -Qf")):
        main(["pbs", *TRAIN])


def test_pbs_that_is_not_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SchedulerError, match=naming("qsub is not installed", "login node", "--dry-run")):
        main(["pbs", *TRAIN])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--hosts", "n0:1"), ("--hosts", "--nodes")),
        (("--node-rank", "0"), ("--node-rank", "leave it out")),
        (("--master", "n0:1"), ("--master", "leave it out")),
        (("--qos", "high"), ("--qos", "--qsub p=")),
        (("--reservation", "R1"), ("--reservation", "--partition R1234")),
        (("--constraint", "a100"), ("--constraint", "--qsub chunk=")),
        (("--gpus-per-node", "a100:1"), ("--gpus-per-node", "--qsub chunk=")),
        (("--exclude", "n1"), ("--exclude", "--partition")),
        (("--sbatch", "exclusive"), ("--sbatch", "--qsub")),
        (("--mpi", "pmix"), ("--mpi", "leave it out")),
        (("--image", "registry/bb"), ("--image", "--module")),
        (("--array", "0-3"), ("--array", "one job per value")),
        (("--preflight", "stop"), ("--preflight", "-- preflight")),
        (("--restarts", "3"), ("--restarts", "submit it again")),
        (("--namespace", "team"), ("--namespace", "Kubernetes alone")),
        (("--env", "TOKEN"), ("--env TOKEN", "qstat -f", "file")),
        (("--name", "7-runs"), ("--name '7-runs'", "a letter")),
        (("--name", "a@b"), ("--name 'a@b'", "letters")),
        (("--name", "a" * 231), ("--name", "229")),
        (("--name", "a b"), ("--name 'a b'", "letters")),
        (("--partition", "gpu,spare"), ("--partition 'gpu,spare'", "one queue")),
        (("--logs", "host:logs"), ("--logs 'host:logs'", "host")),
        (("--time", "UNLIMITED"), ("--time UNLIMITED", "leave it out")),
        (("--time", "2"), ("--time of 2 min", "120 s before it; lengthen")),
        (("--memory", "0"), ("--memory 0", "exclhost")),
        (("--ranks-per-node", "3"), ("3 rank(s)", "batch.global_batch_size")),
        (("--ranks-per-node", "2", "--gpus-per-node", "1"), ("--gpus-per-node 1", "--device cpu")),
    ],
)
def test_pbs_job_that_cannot_be_is_refused_in_one_line_before_it_is_submitted(
    login: Path, words: tuple[str, ...], told: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "secret")
    with pytest.raises(JobRefused, match=naming(*told)) as caught:
        main(["pbs", *words, *TRAIN])
    assert len(str(caught.value).splitlines()) == 1
    assert not (login / "qsub.calls").exists()


def test_pbs_run_that_could_not_go_on_is_refused(login: Path) -> None:
    """PBS may start it again."""
    with pytest.raises(JobRefused, match=naming("--run.resume no", "auto")):
        main(["pbs", *TRAIN, "--run.resume", "no"])
    assert not (login / "qsub.calls").exists()


@pytest.mark.usefixtures("login")
def test_qsub_is_pbs_own() -> None:
    with pytest.raises(JobRefused, match=naming("--qsub", "bigbatch launch slurm", "PBS alone")):
        main(["slurm", "--qsub", "m=abe", *TRAIN])
