"""Variables of --env: only the ranks see the value of a secret."""

import stat
import sys
from pathlib import Path

import pytest
from error_texts import naming
from slurm_stubs import Stubs

from bigbatch.errors import JobRefused
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers.registry import LAUNCHERS
from bigbatch.launch.launchers.slurm_script import sbatch_script
from bigbatch.launch.start import main

TRAIN = ("train", "--config", "quickstart")
VALUE = "s3cr3t"
RANK = """import os, pathlib
words = b" ".join(path.read_bytes() for path in pathlib.Path("/proc").glob("[0-9]*/cmdline") if path.parent.exists())
print(os.environ["TOKEN"], os.environ["STATED"], b"s3" b"cr3t" in words)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("launcher", ["local", pytest.param("torchrun", marks=pytest.mark.long), "mpirun"])
def test_env_reaches_the_ranks_and_no_list_of_processes(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if launcher == "mpirun":
        pytest.importorskip("mpi4py")
    (tmp_path / "rank.py").write_text(RANK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKEN", VALUE)
    # in this process, whose own words have no value
    words = ("--ranks", "1", "--env", "TOKEN", "--env", f"STATED={VALUE}", "--python", "--", "rank.py")
    assert main([launcher, *words]) == 0
    assert capfd.readouterr().out.split() == [VALUE, VALUE, "False"]


@pytest.mark.parametrize("launcher", ["local", "torchrun", "mpirun", "slurm"])
def test_env_that_is_not_set_is_told_before_anything_starts(
    launcher: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TOKEN", raising=False)
    words = (launcher, "--ranks", "1", "--env", "TOKEN")
    with pytest.raises(JobRefused, match=naming("--env TOKEN", "export", "TOKEN=VALUE")):
        main([*words, "--", *TRAIN])
    assert main([*words, "--dry-run", "--", *TRAIN]) == 0  # it may be for elsewhere
    monkeypatch.setenv("TOKEN", VALUE)
    assert main([*words, "--dry-run", "--", *TRAIN]) == 0
    assert VALUE not in capsys.readouterr().out


def test_env_of_a_slurm_script_is_that_of_the_shell_that_submits(tmp_path: Path) -> None:
    stubs, job = Stubs(tmp_path), JobSpec(TRAIN, 2, forwarded=(("TOKEN", None), ("EMPTY", None)))
    code, _ = stubs.run(sbatch_script(job), TOKEN=VALUE, EMPTY="")
    assert (code, stubs.variables()["TOKEN"]) == (0, VALUE)
    (tmp_path / "srun.environ").unlink()
    assert stubs.run(sbatch_script(job), TOKEN=VALUE)[0] == 2
    assert not (tmp_path / "srun.environ").exists()


def test_env_of_a_written_script_is_its_owners_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("--env", f"STATED={VALUE}", "--env", "TOKEN", "--", *TRAIN)
    for name in ("new.sbatch", "old.sbatch"):
        path = tmp_path / name
        if name.startswith("old"):
            path.write_text("edited")
            path.chmod(0o644)
        assert main(["slurm", "--output", name, "--force", *words]) == 0
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert f"STATED={VALUE}" in path.read_text()


@pytest.mark.parametrize("launcher", sorted(LAUNCHERS.keys() - {"k8s"}))
def test_env_secrets_are_those_of_kubernetes(launcher: str) -> None:
    with pytest.raises(JobRefused, match=naming("--env TOKEN@other", "Kubernetes", "export TOKEN")):
        main([launcher, "--ranks", "1", "--env", "TOKEN@other", "--dry-run", "--", *TRAIN])


@pytest.mark.parametrize("word", ["A B", "1A", "A@", "A@-b", "A@B", "@b", ""])
def test_env_words_that_name_nothing_are_refused(word: str) -> None:
    with pytest.raises(JobRefused, match="--env"):
        main(["k8s", "--image", "i", "--env", word, "--dry-run", "--", *TRAIN])
