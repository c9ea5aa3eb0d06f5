"""What becomes of a sweep's points: ends, time limits, signals, folders of others, full disks."""

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from error_texts import naming
from small_sweep import states, write

from bigbatch.cli import main
from bigbatch.experiments.engine import engine
from bigbatch.experiments.engine.folder import SweepFolder
from bigbatch.tools import child
from bigbatch.tools.child import processes_in
from bigbatch.trainer.config.file import PACKAGED
from bigbatch.trainer.folder import folder as folder_of_run


@pytest.mark.long
def test_sweep_point_that_failed_does_not_end_the_others_and_is_tried_again_when_asked(
    file: Path, fake: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", str(file), "--folder", str(fake.path)]
    monkeypatch.setenv("FAKE_CODE", "3")
    assert main(command) == 3
    assert states(fake) == ["failed", "done"]
    state = fake.read_state(0)
    assert (state["reason"], state["exit_code"]) == ("no such image", 3)
    printed = capsys.readouterr().out
    assert "point 0 (ranks=1, seed=0): failed: no such image; 1 of 2" in printed
    assert "point 1 (ranks=1, seed=1): 1,234 images/s; 2 of 2" in printed
    assert "1 of 2 points failed; their output is in" in printed

    monkeypatch.setenv("FAKE_CODE", "0")
    kept = fake.read_state(1)
    assert main(command) == 3  # nothing is missing; one has failed
    assert "2 points, 0 to run" in capsys.readouterr().out
    assert main([*command, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "1,234 images/s" in printed
    assert "nothing would run" in printed
    assert main([*command, "--dry-run", "--retry-failed"]) == 0
    printed = capsys.readouterr().out
    assert [line[:8] for line in printed.splitlines() if line.startswith("point ") and ":" in line] == ["point 0:"]
    assert main([*command, "--retry-failed"]) == 0
    assert states(fake) == ["done", "done"]
    assert fake.read_state(1) == kept, "a point that is done is kept"
    assert main([*command, "--again", "1"]) == 0
    assert fake.read_state(1) != kept, "it was measured again"


@pytest.mark.slow
def test_sweep_point_that_takes_too_long_is_ended(
    file: Path, fake: SweepFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(file, grid={"ranks": [1]}, timeout_minutes=0.01)
    monkeypatch.setenv("FAKE_CODE", "5")
    assert main(["sweep", str(file), "--folder", str(fake.path)]) == 3
    assert fake.read_state(0)["reason"] == "took longer than 0.01 min, and was ended"


def test_evaluations_of_a_running_point_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line may still be being written; a run that goes back to a checkpoint makes the file shorter."""
    parsed: list[str] = []
    monkeypatch.setattr(folder_of_run, "parse_json", lambda text: parsed.append(text) or json.loads(text))
    metrics, seen = tmp_path / "metrics.jsonl", []
    folder: Any = SimpleNamespace(run=lambda number: SimpleNamespace(metrics=metrics))
    plan: Any = SimpleNamespace(timeout_minutes=None)
    watched = engine._Engine(plan, folder, Mock(), lambda point, record: seen.append(record["epoch"]) or "", ())
    running = engine._Running(Mock(), Mock())
    lines = [f'{{"kind": "eval", "epoch": {epoch}, "note": "{"x" * 50}"}}\n' for epoch in range(1, 7)]
    whole = "".join(lines)
    contents = ["", whole[:10], lines[0], whole[: len(lines[0]) + 20], "".join(lines[:3])[:-1], "".join(lines[:4])]
    for content in [*contents, lines[4], lines[4] + lines[5]]:
        metrics.write_text(content)
        for _ in range(2):
            watched._watch(running)
    assert seen == [1, 2, 3, 4, 5, 6]
    assert [len([each for each in parsed if each.startswith(line[:-1])]) for line in lines] == [1] * 6


LAUNCHER = """
import os, signal, subprocess, sys
rank = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
ranks = [
    subprocess.Popen([sys.executable, "-c", rank], stdout=subprocess.PIPE, **kind)
    for kind in ({}, {"preexec_fn": os.setpgrp}, {"start_new_session": True})
]
for each in ranks:
    each.stdout.readline()
if sys.argv[1] == "stays":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), *(each.pid for each in ranks), flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("launcher", ["stays", "leaves"])
def test_sweep_point_that_is_ended_is_outlived_by_no_rank(
    launcher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Open MPI gives ranks process groups of their own, torchrun sessions; these ignore SIGTERM."""
    monkeypatch.setattr(child, "END_SECONDS", 0.3)
    monkeypatch.setattr(child, "LEAVE_SECONDS", 0.1)
    log = tmp_path / "log.txt"
    process = child.ChildProcess([sys.executable, "-c", LAUNCHER, launcher], log=log, within=tmp_path)
    while not log.read_text().endswith("\n"):
        time.sleep(0.01)
    pids = set(map(int, log.read_text().split()))
    sessions = {os.getsid(pid) for pid in pids}
    assert pids == {each.pid for each in processes_in(sessions)}
    process.end()
    left = {each.pid for each in processes_in(sessions)}
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left


def test_sweep_point_is_asked_to_stop_if_its_sweep_is_killed(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    point = "trap 'echo asked; exit' TERM; echo ready; while :; do sleep 0.02; done"
    sweep = (
        "import os, signal, sys, time\n"
        "from pathlib import Path\n"
        "from bigbatch.tools.child import ChildProcess\n"
        f"log = Path({str(log)!r})\n"
        f"process = ChildProcess(['sh', '-c', {point!r}], log=log, within=log.parent)\n"
        "while not log.read_text():\n"
        "    time.sleep(0.01)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", sweep], check=False, timeout=100).returncode == -signal.SIGKILL
    deadline = time.monotonic() + 100
    while log.read_text() != "ready\nasked\n":
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.long
def test_sweep_point_is_missing_after_ctrl_c(file: Path, fake: SweepFolder) -> None:
    """Through the real command, since signals go to processes; the point itself plays the person."""
    point = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(600)"
    script = (
        "import sys\n"
        "from bigbatch.experiments.engine import engine as running\n"
        "from bigbatch.cli import main\n"
        f"running.point_command = lambda *_: [sys.executable, '-c', {point!r}]\n"
        f"sys.exit(main(['sweep', {str(file)!r}, '--folder', {str(fake.path)!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=200)
    assert done.returncode == 130, done.stderr
    assert re.fullmatch("bigbatch: stopped, .*\n", done.stderr)
    assert states(fake) == ["pending", "pending"]


@pytest.mark.long
def test_sweep_points_of_another_experiment_are_refused_and_stay_as_they_are(
    file: Path, fake: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_CODE", "0")
    base = file.with_name("base.yaml")
    base.write_text((PACKAGED / "quickstart.yaml").read_text())
    write(file, config="base.yaml", grid={"ranks": [1]}, seeds=2)
    command = ["sweep", str(file), "--folder", str(fake.path)]
    assert main([*command, "--only", "0"]) == 0
    before = fake.config(0).read_text()
    assert main([*command[:-1], os.path.relpath(fake.path), "--dry-run"]) == 0, "the same folder, named otherwise"
    text = base.read_text()
    changed = re.sub(r"base_lr: .*", "base_lr: 0.75", text)
    assert changed != text
    base.write_text(changed)
    capsys.readouterr()
    for more in (["--dry-run"], []):
        assert main([*command, *more]) == 1
        error = capsys.readouterr().err
        assert re.search(naming(fake.config(0), "schedule.base_lr=", "0.75", "base.yaml"), error)
        assert error.count("\n") == 1
    assert fake.config(0).read_text() == before
    assert not fake.config(1).exists()
    fake.config(0).write_text("[")
    assert main(command) == 1
    assert re.search(naming(fake.config(0), f"remove {fake.point(0)}"), capsys.readouterr().err)


@pytest.mark.slow
def test_sweep_folder_that_cannot_be_locked_is_told(
    file: Path, fake: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setenv("FAKE_CODE", "0")
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert main(["sweep", str(file), "--folder", str(fake.path)]) == 0
    assert re.fullmatch(rf"bigbatch: {fake.path} .*Function not implemented.*\n", capsys.readouterr().err)


@pytest.mark.slow
def test_sweep_on_a_full_disk_ends_with_one_line(
    file: Path, fake: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert main(["sweep", str(file), "--folder", str(fake.path)]) == 1
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert error.count("\n") == 1


@pytest.mark.long
def test_sweep_folder_of_others_is_refused(
    file: Path, fake: SweepFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FAKE_CODE", "0")
    assert main(["sweep", str(file), "--folder", str(fake.path)]) == 0
    write(file, steps=11, grid={"ranks": [1]}, seeds=2)
    assert main(["sweep", str(file), "--folder", str(fake.path)]) == 1
    assert re.search(naming(fake.path, "steps: 10", " 11", "--folder"), capsys.readouterr().err)
    assert main(["sweep", str(file), "--folder", str(fake.path), "--dry-run"]) == 1, "its states are of other points"
    assert re.search(naming(fake.path, "steps: 10", " 11"), capsys.readouterr().err)
    other = file.with_name("other")
    other.mkdir()
    (other / "thesis.tex").touch()
    assert main(["sweep", str(file), "--folder", str(other)]) == 1
    assert re.search(naming(other, "empty"), capsys.readouterr().err)
    assert os.listdir(other) == ["thesis.tex"]
