"""torchrun's arguments and the processes that it leaves; its argument lists are in tests/golden."""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from torch.distributed.run import get_args_parser

from bigbatch.comm.rendezvous.ports import free_port
from bigbatch.launch.jobs.spec import JobSpec
from bigbatch.launch.launchers import torchrun_agent
from bigbatch.launch.launchers.registry import load_launcher
from bigbatch.launch.launchers.torchrun import AGENT, torchrun_argv

TRAIN = ("train", "--config", "quickstart")


@pytest.mark.parametrize("name", [("train.py",), ("-m", "my.train")])
@pytest.mark.parametrize("words", [(), ("--",), ("--", "--", "-x"), ("-x", "--", "y"), ("x", "--")])
def test_torchrun_hands_on_every_word_of_a_script(name: tuple[str, ...], words: tuple[str, ...]) -> None:
    """The words are parsed by torchrun's own parser."""
    argv = torchrun_argv(JobSpec((*name, *words), 2, is_python=True))
    read = get_args_parser().parse_args(argv[argv.index(AGENT) + 1 :])
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
    assert load_launcher(launcher).start(job, environ=environ, options=argparse.Namespace()) == 0
    said = capfd.readouterr()
    assert said.out.split() == [threads] * ranks
    assert "OMP_NUM_THREADS" not in said.err


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "words", "is_python", "told"),
    [
        (1, ("train", "--config", "quickstart", "--data.root", "/nowhere"), False, "bigbatch: /nowhere/train: no such"),
        (137, ("import os; os.kill(os.getpid(), 9)",), True, "bigbatch: rank 0 was ended by SIGKILL"),
        (3, ("raise SystemExit(3)",), True, "bigbatch: rank 0 ended with exit code 3"),
    ],
)
def test_torchrun_adds_nothing_to_a_ranks_own_error(
    code: int, words: tuple[str, ...], is_python: bool, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line, and the rank's own exit code; torchrun itself prints a traceback and a table, and exits with 1."""
    if is_python:
        (tmp_path / "rank.py").write_text(words[0])
        words = (str(tmp_path / "rank.py"),)
    else:
        words = (*words, "--run.directory", str(tmp_path / "run"))
    job = JobSpec(words, 1, is_python=is_python)
    assert load_launcher("torchrun").start(job, environ=os.environ, options=argparse.Namespace()) == code
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(told)


@pytest.mark.long
def test_torchrun_names_a_port_in_use_in_a_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        job = JobSpec(("rank.py",), 1, num_nodes=1, node_rank=0, master=("127.0.0.1", port), is_python=True)
        argv = [sys.executable, *torchrun_argv(job)[1:]]
        ended = subprocess.run(argv, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    (line,) = ended.stderr.splitlines()
    assert (ended.returncode, f"127.0.0.1:{port}" in line, "address already in use" in line) == (1, True, True)


@pytest.mark.long
def test_torchrun_on_one_host_opens_another_port_if_one_was_taken_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rank.py").write_text("import os, pathlib; pathlib.Path('port').write_text(os.environ['MASTER_PORT'])")
    monkeypatch.chdir(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        chosen = iter([taken.getsockname()[1]] * 2)
        monkeypatch.setattr(torchrun_agent, "free_port", lambda: next(chosen, None) or free_port())
        argv = torchrun_argv(JobSpec(("rank.py",), 1, is_python=True))
        assert torchrun_agent.main(argv[argv.index(AGENT) + 1 :]) == 0
        assert next(chosen, None) is None
        assert int(Path("port").read_text()) != taken.getsockname()[1]


@pytest.mark.long
def test_torchrun_leaves_no_folder_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own default is a folder torchelastic_* for the ranks' error files, which stays."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    script = tmp_path / "rank.py"
    script.write_text("import os; assert os.path.isdir(os.path.dirname(os.environ['TORCHELASTIC_ERROR_FILE']))")
    job = JobSpec((str(script),), 1, is_python=True)
    assert load_launcher("torchrun").start(job, environ=os.environ, options=argparse.Namespace()) == 0
    assert list(tmp_path.iterdir()) == [script]
