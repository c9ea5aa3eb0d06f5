"""The first rank's record of its end, for its launcher."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bigbatch.cli import main
from bigbatch.comm.rendezvous.environ import ALONE, STOPPED_VARIABLE
from bigbatch.comm.rendezvous.exit_record import BEGUN, has_recorded_failure, read_record, record_begin, record_end


def test_first_code_that_the_first_rank_records_stays(tmp_path: Path) -> None:
    file = tmp_path / "file"
    env = replace(ALONE, stopped_file=file)
    record_end(env, 6)
    assert read_record(file) is None, "a host that does not see it makes none"
    file.touch()
    record_end(replace(env, rank=1, world_size=2), 6)
    assert read_record(file) == ""
    record_end(env, 130)
    record_end(env, 0)
    record_begin(env)
    assert read_record(file) == 130
    assert not has_recorded_failure(file)
    file.write_text("6")
    assert has_recorded_failure(file)


def test_first_rank_of_a_later_group_records_instead_of_the_former_one(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    former, other, later = (replace(ALONE, rank=rank, world_size=4, stopped_file=file) for rank in (0, 1, 3))
    record_begin(former)
    record_end(former, 6)  # a network separates it from the others, which continue
    record_begin(replace(later, rank=0, world_size=2, former_rank=3))
    for each in (former, other):
        record_end(each, 6)
    assert isinstance(read_record(file), str)
    record_end(later, 4)
    assert read_record(file) == 4


@pytest.mark.parametrize(
    ("end", "record"),
    [
        ("", 0),
        ("sys.exit(3)", 0),
        ("1 / 0", BEGUN),
        ("os._exit(0)", BEGUN),
        ("os.fork() or sys.exit(); os._exit(0)", BEGUN),
    ],
)
def test_own_script_records_that_its_interpreter_ended_without_an_exception(
    end: str, record: int | str, tmp_path: Path
) -> None:
    """mpirun itself reports a code other than 0."""
    file = tmp_path / "file"
    file.touch()
    script = (
        "import os, sys\nfrom bigbatch.comm.rendezvous.environ import read_process_env\n"
        "from bigbatch.comm.rendezvous.exit_record import record_begin\nrecord_begin(read_process_env())\n"
    )
    subprocess.run([sys.executable, "-c", script + end], env={STOPPED_VARIABLE: str(file)}, capture_output=True)
    assert read_record(file) == record


@pytest.mark.parametrize(("words", "code"), [("config list", 0), ("config show no-such", 1), ("config list --help", 0)])
def test_command_records_its_code(words: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(STOPPED_VARIABLE, str(tmp_path / "file"))
    try:
        main(words.split())
    except SystemExit:
        assert "--help" in words
    assert read_record(tmp_path / "file") == code
