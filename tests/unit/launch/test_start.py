"""`bigbatch launch` as a command: what a shell makes of its dry run."""

import shlex
import subprocess

import pytest

from bigbatch.launch.start import main

TRAIN = ("train", "--config", "quickstart")


def test_launch_dry_run_prints_a_line_that_a_shell_takes_apart_again(capsys: pytest.CaptureFixture[str]) -> None:
    folder = 'runs/it\'s; $(touch x) "here"'
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
