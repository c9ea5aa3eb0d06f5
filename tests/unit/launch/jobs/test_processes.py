"""The supervisor of a job's processes, with plain ones."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from error_texts import naming

from bigbatch.errors import INTERRUPTED, LOST, LaunchOptionError
from bigbatch.launch.jobs import processes
from bigbatch.launch.jobs.processes import NodeProcess, run_processes

FOREVER = 600
"""Longer than a test may take: a test that waits for such a sleep fails."""


def ended_with(*scripts: str, **options: Any) -> int:
    """Run a process for each script of sh; return the job's exit code."""
    starts = [NodeProcess(0, ("sh", "-c", script), name="rank") for script in scripts]
    return run_processes(starts, environ=os.environ, asks_to_stop=signal.SIGTERM, **options).code


def test_run_processes_ends_all_after_the_first_that_fails_with_its_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", FOREVER)  # so that SIGTERM it was
    assert ended_with(f"exec sleep {FOREVER}", "sleep 0.1; exit 3") == 3
    assert ended_with(f"exec sleep {FOREVER}", "kill -KILL $$") == 128 + 9


def test_run_processes_wakes_who_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen rank would cost a job that heals all the time that is granted to those that end by themselves."""
    monkeypatch.setattr(processes, "GRACE_SECONDS", FOREVER)
    assert ended_with("kill -STOP $$", "sleep 0.3; exit 3") == 3


def test_run_processes_takes_who_lost_another_rank_for_no_cause() -> None:
    """Both have ended by the first look: the code of the one that failed by itself tells whether a start may help."""
    ended = [subprocess.Popen(("sh", "-c", f"exit {code}")) for code in (LOST, 1)]
    assert [process.wait() for process in ended] == [LOST, 1]
    assert processes._wait(dict(enumerate(ended)), names=("", "")) == 1


@pytest.mark.parametrize(
    ("scripts", "expected"),
    [
        (("kill -KILL $$", "sleep 0.2"), 0),
        (("sleep 0.2", f"sleep 0.1; exit {LOST}", "kill -KILL $$"), 0),
        (("kill -KILL $$", "sleep 0.1; kill -KILL $$"), 137),  # none is left
        (("kill -KILL $$", f"sleep 0.1; exit {LOST}"), LOST),
        ((f"exec sleep {FOREVER}", "exit 1"), 1),  # an error of the user's ends all
        (("exit 0", "kill -STOP $$"), 0),  # one that was left behind
        ((f"sleep 0.1; exit {LOST}", f"kill -STOP $$; exec sleep {FOREVER}"), LOST),  # none can continue
        ((f"exit {LOST}", "sleep 0.2; kill -KILL $$", "sleep 0.6; : STOP"), 0),  # one that continues
    ],
)
def test_run_processes_lets_the_others_go_on_in_a_job_that_heals(
    scripts: tuple[str, ...], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.3 if "STOP" in scripts[-1] else FOREVER)
    assert ended_with(*scripts, heals=lambda: True) == expected


def test_run_processes_ends_the_others_of_a_job_that_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", FOREVER)
    assert ended_with("kill -KILL $$", f"exec sleep {FOREVER}", heals=lambda: False) == 137


@pytest.mark.parametrize(
    ("lost", "again", "other", "expected"),
    [
        ("kill -KILL $$", "rm $BIGBATCH_JOINS", "", 0),
        ("kill -KILL $$", f"exit {LOST}", "", 0),  # refused: the others continue
        ("kill -KILL $$", "rm $BIGBATCH_JOINS; exit 1", "exec sleep 600", 1),  # an error of the user's, as of any rank
        ("kill -KILL $$", "kill -KILL $$", "", 0),  # it has not joined, and does not start a second time
        ("kill -KILL $$", "exec sleep 600", "exit 7", 7),  # there is no job to join any more
        (f"exit {LOST}", "exit 9", "", 0),  # it has lost the others
        ("exit 1", "exit 9", "", 1),
    ],
)
def test_run_processes_starts_a_lost_process_again_to_join_the_others(
    lost: str, again: str, other: str, expected: int, tmp_path: Path
) -> None:
    """The other one ends after that, if it is to happen."""
    starts_again = lost.startswith("kill")
    script = f'if [ "$BIGBATCH_JOINS" ]; then echo >> {tmp_path}/again; {again}; else {lost}; fi'
    waits = f"until [ -e {tmp_path}/again ]; do sleep 0.02; done; sleep 0.1; {other}" if starts_again else "sleep 0.2"
    assert ended_with(script, waits, heals=lambda: True, joins=2) == expected
    assert (tmp_path / "again").exists() == starts_again
    assert not starts_again or (tmp_path / "again").read_text() == "\n", "one start was enough"


@pytest.mark.parametrize(
    ("lost", "again", "others", "joins", "expected"),
    [
        ("kill -KILL $$", "rm $BIGBATCH_JOINS", (), 1, 0),
        ("kill -KILL $$", f"exit {LOST}", (), 2, LOST),  # there is no job to join
        ("kill -KILL $$", "rm $BIGBATCH_JOINS; kill -KILL $$", (), 1, 137),
        ("kill -KILL $$", "rm $BIGBATCH_JOINS", (), 0, 137),
        ("exit 7", "exit 9", (), 1, 7),  # a defect, which may end the processes of the other nodes, too
        ("kill -KILL $$", "exit 9", ("kill -KILL $$",), 0, 137),  # this node is lost
    ],
)
def test_run_processes_starts_the_only_process_of_a_node_again_to_join_those_of_other_nodes(
    lost: str, again: str, others: tuple[str, ...], joins: int, expected: int
) -> None:
    script = f'if [ "$BIGBATCH_JOINS" ]; then {again}; else {lost}; fi'
    assert ended_with(script, *others, heals=lambda: True, joins=joins, is_part=True) == expected


def test_run_processes_starts_none_again_if_all_have_ended_at_once() -> None:
    """There is no job to join."""
    started = list[int]()
    ended = [subprocess.Popen(("sh", "-c", "kill -KILL $$")) for _ in range(3)]
    for process in ended:
        process.wait()
    code = processes._wait(
        dict(enumerate(ended)), names=["rank"] * 3, heals=lambda: True, start_again=lambda n: bool(started.append(n))
    )
    assert (code, started) == (128 + signal.SIGKILL, [])


def test_run_processes_starts_a_process_again_that_has_joined_the_others(tmp_path: Path) -> None:
    lost = f'echo >> {tmp_path}/starts; [ "$BIGBATCH_JOINS" ] && rm $BIGBATCH_JOINS; '
    lost += f"[ $(wc -l < {tmp_path}/starts) = 3 ] || kill -KILL $$"
    waits = f"until [ -e {tmp_path}/starts ] && [ $(wc -l < {tmp_path}/starts) = 3 ]; do sleep 0.02; done"
    assert ended_with(lost, waits, heals=lambda: True, joins=2) == 0


def test_run_processes_names_a_rank_that_a_signal_ended_also_where_there_is_no_other(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """It could say nothing itself."""
    for script, said in (("kill -KILL $$", "bigbatch: rank was ended by SIGKILL\n"), ("exit 3", "")):
        ended_with(script)
        assert capfd.readouterr().err == said


@pytest.mark.slow
def test_run_processes_kills_who_does_not_heed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE_SECONDS", 0.5)
    stubborn = f"trap '' TERM; touch {tmp_path}/deaf; exec sleep {FOREVER}"
    fails = f"until [ -e {tmp_path}/deaf ]; do sleep 0.02; done; exit 3"
    start = time.monotonic()
    assert ended_with(stubborn, fails) == 3
    assert time.monotonic() - start > 0.5


def test_run_processes_ends_what_was_started_where_a_launcher_is_missing() -> None:
    starts = [NodeProcess(0, ("sleep", f"{FOREVER}")), NodeProcess(0, ("no-such-mpirun",))]
    with pytest.raises(LaunchOptionError, match=naming("no-such-mpirun", "not installed")):
        run_processes(starts, environ=os.environ, asks_to_stop=signal.SIGTERM)


def test_run_processes_ends_what_was_started_where_one_cannot_enter() -> None:
    def enter(node: int) -> None:
        if node == 1:
            raise FileNotFoundError

    starts = [NodeProcess(0, ("sleep", f"{FOREVER}")), NodeProcess(1, ("sleep", f"{FOREVER}"))]
    with pytest.raises(subprocess.SubprocessError):
        run_processes(starts, environ=os.environ, enter=enter, asks_to_stop=signal.SIGTERM)


def test_run_processes_ends_those_that_are_there_at_an_early_ctrl_c(tmp_path: Path) -> None:
    """A process that is starting at this moment could not have been asked."""

    def enter(node: int) -> None:
        if node == 1:
            os.kill(os.getppid(), signal.SIGINT)

    stubborn = f"trap '' TERM; touch {{}}; exec sleep {FOREVER}"
    starts = [NodeProcess(node, ("sh", "-c", stubborn.format(tmp_path / str(node)))) for node in range(3)]
    ended = run_processes(starts, environ=os.environ, enter=enter, asks_to_stop=signal.SIGTERM)
    assert (ended.code, ended.was_asked) == (INTERRUPTED, True)
    assert not (tmp_path / "2").exists(), "no more are started"


@pytest.mark.parametrize("heals", [None, lambda: True])
@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        (f"exec sleep {FOREVER}", INTERRUPTED, ""),
        ("trap 'kill -KILL $$' TERM; while :; do sleep 0.05; done", 137, "SIGKILL"),
    ],
)
def test_run_processes_that_a_request_to_stop_ended_have_not_failed(
    script: str, code: int, said: str, heals: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    """Ranks that still import torch have no handler: the signal ends them. Another signal is a failure all the same."""
    requests = iter([signal.SIGINT])
    ask = lambda: [os.kill(os.getpid(), number) for number in requests]  # noqa: E731
    assert ended_with(script, script, on_poll=ask, heals=heals) == code
    told = capfd.readouterr().err.splitlines()[2:]
    assert bool(told) == bool(said)
    assert all(said in line for line in told)


PARENT = """
import os, signal, sys
from bigbatch.launch.jobs.foreground import run_in_foreground
from bigbatch.launch.jobs.processes import NodeProcess, run_processes
argv, how = [sys.executable, "-c", sys.argv[1]], {"environ": os.environ, "asks_to_stop": signal.SIGUSR1}
start = NodeProcess(0, tuple(argv))
ended = run_in_foreground(argv, **how) if sys.argv[2] == "alone" else run_processes([start], joins=1, **how)
sys.exit(ended.code)
"""
CHILD = """
import os, signal, time
def say(text):  # not print, within which a handler may not print again
    os.write(1, text.encode() + b"\\n")
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, frame: say(signal.Signals(number).name))
say("ready")
while True:
    time.sleep(0.05)
"""


@pytest.mark.parametrize("how", ["alone", "together"])
def test_run_processes_asks_then_insists_then_kills_by_ctrl_c(how: str) -> None:
    """The whole process group gets SIGINT, as from a terminal; also of a launcher that runs alone in the foreground."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, how], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for said in ("ready", "SIGUSR1", "SIGTERM"):
        assert process.stdout.readline() == said + "\n"
        os.killpg(process.pid, signal.SIGINT)
    assert process.wait(timeout=200) == INTERRUPTED
    assert process.stdout.read() == ""


def test_folder_of_ranks_that_join_is_removed_if_the_launcher_is_killed(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PARENT, f"import time; print('ready', flush=True); time.sleep({FOREVER})", "together"]
    environ = os.environ | {"TMPDIR": f"{tmp_path}"}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, env=environ, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert list(tmp_path.iterdir())
    process.kill()
    assert process.stdout.read() == "", "its process has ended"
    deadline = time.monotonic() + 100
    while list(tmp_path.iterdir()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.wait()
