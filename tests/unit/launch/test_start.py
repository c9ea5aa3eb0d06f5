"""`bigbatch launch` as a command: what a shell makes of its dry run."""

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
