"""torchrun's arguments and the processes that it leaves; its argument lists are in tests/golden."""

import argparse
import os
import tempfile
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers.registry import LAUNCHERS
from bigbatch.launch.launchers.torchrun import torchrun_argv

TRAIN = ("train", "--config", "quickstart")


@pytest.mark.parametrize("name", [("train.py",), ("-m", "my.train")])
@pytest.mark.parametrize("words", [(), ("--",), ("--", "--", "-x"), ("-x", "--", "y"), ("x", "--")])
def test_torchrun_hands_on_every_word_of_a_script(name: tuple[str, ...], words: tuple[str, ...]) -> None:
    """The words are parsed by torchrun's own parser."""
    argv = torchrun_argv(JobSpec((*name, *words), 2, is_python=True), port=1)
    read = get_args_parser().parse_args(argv[argv.index("torch.distributed.run") + 1 :])
    assert (read.training_script, tuple(read.training_script_args), read.module) == (name[-1], words, len(name) == 2)


@pytest.mark.parametrize(
    ("launcher", "ranks", "stated", "threads"),
    [
        *(("local", 2, {}, "1"), ("local", 2, {"OMP_NUM_THREADS": "3"}, "3"), ("local", 1, {}, "0")),
        pytest.param("torchrun", 2, {}, "1", marks=pytest.mark.long),
    ],
)
def test_ranks_of_a_host_share_its_cores(
    launcher: str, ranks: int, stated: dict[str, str], threads: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One thread per rank, as torchrun sets it, without its warning of five lines."""
    script = tmp_path / "threads.py"
    # one write for the line and its end: torchrun's ranks do not buffer, and print would write them apart
    script.write_text(r"import os; print(os.environ.get('OMP_NUM_THREADS', '0') + '\n', end='')")
    job = JobSpec((str(script),), ranks, is_python=True)
    environ = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | stated
    assert LAUNCHERS[launcher].start(job, environ=environ, options=argparse.Namespace()) == 0
    said = capfd.readouterr()
    assert said.out.split() == [threads] * ranks
    assert "OMP_NUM_THREADS" not in said.err


@pytest.mark.long
def test_torchrun_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own default is a folder torchelastic_* for the ranks' error files, which stays."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    script = tmp_path / "rank.py"
    script.write_text("import os; assert os.path.isdir(os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE']))")
    job = JobSpec((str(script),), 1, is_python=True)
    assert LAUNCHERS["torchrun"].start(job, environ=os.environ, options=argparse.Namespace()) == 0
    assert list(tmp_path.iterdir()) == [script]
