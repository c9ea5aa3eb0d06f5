"""A point that an earlier try began: from its beginning or from its checkpoint, and never beside one that runs."""

import os
import re
from dataclasses import replace
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import yaml
from error_texts import naming
from owned_folder import owning

from bigbatch.cli import main
from bigbatch.errors import RunFolderError
from bigbatch.experiments.engine import engine as running
from bigbatch.experiments.engine.engine import run_points
from bigbatch.experiments.engine.folder import SweepFolder
from bigbatch.experiments.engine.plan import read_plan
from bigbatch.experiments.engine.points import make_points
from bigbatch.trainer.folder import owner

GENERATED = {"data.loader": "synthetic", "data.num_synthetic_samples": 2048}
SWEEP: dict[str, Any] = {"name": "small", "config": "quickstart", "epochs": 1, "cases": {"plain": {}}}
SWEEP["options"] = GENERATED


class Begun:
    """A sweep's folder whose point began, left a checkpoint, and did not end; what is started is noted."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (path / "small.yaml").write_text(yaml.safe_dump(SWEEP))
        self.plan, self.folder = read_plan(path / "small.yaml"), SweepFolder(path / "out")
        self.points = make_points(self.plan, folder=self.folder.path)
        self.folder.prepare(self.plan, self.points)
        self.checkpoint = self.folder.run(0).checkpoints / "step-3"
        self.checkpoint.mkdir(parents=True)
        self.found: list[bool] = []
        monkeypatch.setattr(running, "point_command", self._command)

    def _command(self, *_: object) -> list[str]:
        self.found.append(self.checkpoint.exists())
        return ["false"]

    def go(self, *, goes_on: bool) -> None:
        """goes_on: it trains, instead of measuring speed."""
        ended: list[Any] = []
        plan = self.plan if goes_on else replace(self.plan, steps=3)
        run_points(plan, self.points, self.folder, on_end=lambda point, state: ended.append(state))
        assert len(ended) == 1


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begun:
    return Begun(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("state", "goes_on", "kept"),
    [("pending", True, True), ("pending", False, False), ("failed", True, False)],
)
def test_sweep_goes_on_with_a_training_that_was_interrupted_and_measures_speed_anew(
    state: str, goes_on: bool, kept: bool, begun: Begun
) -> None:
    begun.folder.change_state(0, state=state)
    begun.go(goes_on=goes_on)
    assert begun.found == [kept]


@pytest.mark.parametrize("goes_on", [True, False])
def test_sweep_leaves_a_run_alone_that_outlived_its_sweep(
    goes_on: bool, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "PATIENCE_SECONDS", 0.0)
    run = begun.folder.run(0).path
    with owning(run), pytest.raises(RunFolderError, match=naming(run, f"process {os.getpid()}", "wait for its end")):
        begun.go(goes_on=goes_on)
    assert begun.found == []
    assert begun.checkpoint.exists()
    assert begun.folder.read_state(0)["state"] == "pending"
    begun.go(goes_on=goes_on)
    assert begun.found == [goes_on]


def test_sweep_asks_for_the_owners_of_all_points_at_once(begun: Begun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take half a minute: an owner on another host that was killed leaves no end."""
    together, asked = Barrier(3, timeout=30), list[Path]()
    monkeypatch.setattr(running, "require_free", lambda path: asked.append(path) or together.wait())
    for number in (1, 2):
        begun.folder.run(number).path.mkdir(parents=True)
    running.require_idle(begun.folder, range(3))
    assert len(asked) == 3


def test_point_that_starts_over_leaves_no_inference_of_its_earlier_training(begun: Begun) -> None:
    point = begun.folder.point(0)
    (point / "evaluate--fold").mkdir()
    for name in ("evaluate--fold/evaluation.json", "evaluate--fold.txt", "log.txt"):
        (point / name).write_text("")
    kept = {path.name for path in point.iterdir()} - {"run", "log.txt", "evaluate--fold", "evaluate--fold.txt"}
    running.start_over(begun.folder, 0)
    assert {path.name for path in point.iterdir()} == kept


@pytest.mark.parametrize("words", ["OSError: [Errno 28] No space left on device", "bigbatch: Disk quota exceeded"])
def test_sweep_point_that_found_the_disk_full_has_not_failed(
    words: str, begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "point_command", lambda *_: ["sh", "-c", f"echo '{words}'; exit 1"])
    with pytest.raises(RunFolderError, match=naming("point 0", "free disk space")):
        begun.go(goes_on=True)
    assert begun.folder.read_state(0)["state"] == "pending"
    assert begun.checkpoint.exists()


def test_sweep_in_whose_folder_another_command_trains_is_refused(
    begun: Begun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["sweep", str(tmp_path / "small.yaml"), "--folder", str(begun.folder.path)]
    with begun.folder.locked():
        assert main(command) == 1
    assert re.fullmatch(f"bigbatch: another command trains in {begun.folder.path}: .*\n", capsys.readouterr().err)
    assert begun.found == []


def test_sweep_does_not_follow_a_link_in_the_place_of_a_run(begun: Begun, tmp_path: Path) -> None:
    other = tmp_path / "other"
    begun.folder.run(0).path.rename(other)
    begun.folder.run(0).path.symlink_to(other)
    with pytest.raises(RunFolderError, match=naming(begun.folder.run(0).path, "is a link")):
        begun.go(goes_on=False)
    assert (other / "checkpoints/step-3").exists()


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"state": ["missing"], "number": 0}',
        '{"state": NaN, "number": 0}',
        '{"state": "done", "number": "../../other"}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_sweep_point_whose_state_is_none_is_named(
    text: str, begun: Begun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun.folder.state(0).write_text(text)
    assert main(["sweep", str(tmp_path / "small.yaml"), "--folder", str(begun.folder.path)]) == 1
    assert f"{begun.folder.state(0)} is not readable: remove {begun.folder.point(0)}" in capsys.readouterr().err
    assert begun.found == []


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("name: 2026-01-02\n", '"2026-01-02"'),
        ("&a a0: &b [x]\na1: &c [" + "*b, " * 17 + "]\nname: *c\n", "is not readable"),
    ],
    ids=["a date", "aliases"],
)
def test_sweep_folder_of_something_else_is_named(
    text: str, named: str, begun: Begun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun.folder.sweep.write_text(text)
    assert main(["sweep", str(tmp_path / "small.yaml"), "--folder", str(begun.folder.path)]) == 1
    told = capsys.readouterr().err
    assert named in told
    assert "name another --folder" in told
    assert told.count("\n") == 1
