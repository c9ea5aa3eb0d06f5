"""`bigbatch launch` as a command: what a shell makes of its dry run."""

import shlex
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from error_texts import naming
from other_launchers import FAMILIES, left_by

from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.errors import JobRefused, LaunchOptionError
from bigbatch.launch.jobs.foreground import Ended
from bigbatch.launch.jobs.processes import NodeProcess
from bigbatch.launch.launchers import local, mpirun, torchrun
from bigbatch.launch.start import main

TRAIN = ("train", "--config", "quickstart")


def test_launch_dry_run_prints_a_line_that_a_shell_takes_apart_again(capsys: pytest.CaptureFixture[str]) -> None:
    folder = 'runs/it\'s; `touch x` "here" $'
    assert main(["torchrun", "--ranks", "2", "--dry-run", "--", *TRAIN, "--run.directory", folder]) == 0
    printed = capsys.readouterr().out
    words = subprocess.run(["sh", "-c", f"printf '%s\\n' {printed}"], capture_output=True, text=True, check=True)
    assert words.stdout.splitlines()[-1] == folder


@pytest.mark.parametrize("words", [("--ranks", "2", *TRAIN), ("train", "--ranks", "2", "--config", "quickstart")])
def test_launch_says_where_two_dashes_are_missing(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["local", *words])
    assert caught.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert shlex.split(said.rpartition(": ")[2]) == ["bigbatch", "launch", "local", "--ranks", "2", "--", *TRAIN]


def test_launch_refuses_an_unknown_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["local", "--rank", "2", "--", *TRAIN])
    assert "unrecognized arguments: --rank 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "here"),
    [
        (("torchrun", "--nproc_per_node=2"), "--ranks"),
        (("mpirun", "-np", "2"), "--ranks"),
        (("slurm", "--gpus", "8"), "--gpus-per-node"),
    ],
)
def test_launch_translates_options_of_other_launchers(words: tuple[str, ...], here: str) -> None:
    with pytest.raises(LaunchOptionError, match=naming(words[1].partition("=")[0].replace("_", "-"), here)):
        main([*words, "--", *TRAIN])


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[str], dict[str, str]]]:
    """Words and environment of each process that a launcher here would have started."""
    calls: list[tuple[list[str], dict[str, str]]] = []

    def processes(starts: Iterable[NodeProcess], *, environ: Mapping[str, str], **_: object) -> Ended:
        calls.extend((list(each.argv), {**environ, **dict(each.variables)}) for each in starts)
        return Ended(0, was_asked=False)

    def foreground(argv: list[str], *, environ: Mapping[str, str], **_: object) -> Ended:
        calls.append((argv, dict(environ)))
        return Ended(0, was_asked=False)

    monkeypatch.setattr(local, "run_processes", processes)
    for each in (mpirun, torchrun):
        monkeypatch.setattr(each, "run_in_foreground", foreground)
    return calls


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("launcher", ["local", "mpirun", "torchrun"])
def test_launch_gives_its_ranks_no_place_in_another_launchers_job(
    launcher: str,
    family: str,
    started: list[tuple[list[str], dict[str, str]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").touch()
    for name, value in left_by(family).items():
        monkeypatch.setenv(name, value)
    hosts = ("--hosts", "n0:1,n1:1", "--preflight", "off") if launcher == "mpirun" else ("--ranks", "2")
    assert main([launcher, *hosts, "--python", "--", "own.py"]) == 0
    places = [read_process_env(environ) for _, environ in started]
    if launcher == "local":
        assert [(each.launcher, each.rank, each.world_size) for each in places] == [("torchrun", n, 2) for n in (0, 1)]
        assert not any(each.master_runs or each.stopped_file for each in places)
    else:
        # these two say it themselves
        assert [(each.launcher, each.world_size, each.master) for each in places] == [("none", 1, None)]
        assert not {"MASTER_ADDR", *left_by(family)} & {*started[0][0]} - {"BIGBATCH_STOPPED"}
    assert not [name for _, environ in started for name in environ if name.startswith(("PET_", "PMIX_", "PMI_"))]


def test_launch_keeps_what_a_user_passes_on_by_name_but_no_rank(
    started: list[tuple[list[str], dict[str, str]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").touch()
    monkeypatch.setenv("MASTER_ADDR", "n0")
    monkeypatch.setenv("RANK", "0")
    assert main(["torchrun", "--env", "MASTER_ADDR", "--env", "MASTER_PORT=29500", "--python", "--", "own.py"]) == 0
    assert (started[0][1]["MASTER_ADDR"], started[0][1]["MASTER_PORT"]) == ("n0", "29500")
    for words in ("RANK", "WORLD_SIZE=1", "OMPI_COMM_WORLD_SIZE=1", "PET_STANDALONE=1", "HOROVOD_RANK=1"):
        with pytest.raises(JobRefused, match=naming(f"--env {words.partition('=')[0]}", "leave it out")):
            main(["local", "--ranks", "2", "--env", words, "--python", "--", "own.py"])


def test_launch_mpirun_starts_one_job_in_a_shell_of_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("mpi4py")
    for family in ("PyTorchJob", "one rank of torchrun"):
        for name, value in left_by(family).items():
            monkeypatch.setenv(name, value)
    (tmp_path / "own.py").write_text(
        "from bigbatch.comm.rendezvous.environ import read_process_env as read\n"
        "print(f'{read().rank} of {read().world_size} by {read().launcher}\\n', end='')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["mpirun", "--ranks", "2", "--python", "--", "own.py"]) == 0
    assert sorted(capfd.readouterr().out.split("\n"))[-2:] == ["0 of 2 by openmpi", "1 of 2 by openmpi"]
