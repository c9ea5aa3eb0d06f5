"""A point that an earlier try began: from its beginning or from its checkpoint, and never beside one that runs."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from error_texts import naming

from bigbatch.cli import main
from bigbatch.errors import RunFolderError
from bigbatch.launch.ablate.plan import find_ablation, make_points
from bigbatch.launch.sweep import running
from bigbatch.launch.sweep.folder import SweepFolder, change_state, prepare, read_state
from bigbatch.launch.sweep.running import run_points
from bigbatch.trainer.run import owner
from bigbatch.trainer.run.owner import owning

ABLATION: dict[str, Any] = {
    "name": "small",
    "config": "quickstart",
    "options": {},
    "steps": {"plain": {}},
    "target_top1": None,
    "ranks": 1,
    "timeout_minutes": 5,
}


class Begun:
    """An ablation's folder whose point began, left a checkpoint, and did not end; what is started is noted."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (path / "small.yaml").write_text(yaml.safe_dump(ABLATION))
        ablation = find_ablation(str(path / "small.yaml"))
        self.sweep, self.folder = ablation.as_sweep(), SweepFolder(path / "out")
        self.points = make_points(ablation, folder=self.folder.path, epochs=1, seeds=1, overrides=[])
        prepare(self.folder, self.sweep, self.points)
        self.checkpoint = self.folder.run(0).checkpoints / "step-3"
        self.checkpoint.mkdir(parents=True)
        self.found: list[bool] = []
        monkeypatch.setattr(running, "run_logged", self._run)

    def _run(self, argv: object, *, log: Path, seconds: float) -> tuple[int, str]:
        self.found.append(self.checkpoint.exists())
        return 1, "itself"

    def go(self, *, goes_on: bool) -> None:
        ended: list[Any] = []
        run_points(
            self.sweep, self.points, self.folder, on_end=lambda point, state: ended.append(state), goes_on=goes_on
        )
        assert len(ended) == 1


@pytest.fixture
def begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begun:
    return Begun(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("state", "goes_on", "kept"),
    [("missing", True, True), ("missing", False, False), ("failed", True, False)],
)
def test_sweep_starts_over_and_an_ablation_goes_on_with_what_was_interrupted(
    state: str, goes_on: bool, kept: bool, begun: Begun
) -> None:
    change_state(begun.folder, 0, state=state)
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
    assert read_state(begun.folder, 0)["state"] == "missing"
    begun.go(goes_on=goes_on)
    assert begun.found == [goes_on]


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
        "{}",
        "[]",
        '[["state", "done"]]',
        '{"state": ["missing"], "number": 0}',
        '{"state": NaN, "number": 0}',
        '{"state": "begun", "number": 0}',
        '{"state": "done", "number": "../../other"}',
        "[" * 100_000,
    ],
    ids=lambda text: text[:40],
)
def test_sweep_point_whose_state_is_none_is_named(
    text: str, begun: Begun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun.folder.state(0).write_text(text)
    assert main(["ablate", str(tmp_path / "small.yaml"), "--folder", str(begun.folder.path), "--epochs", "1"]) == 1
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
    assert main(["ablate", str(tmp_path / "small.yaml"), "--folder", str(begun.folder.path), "--epochs", "1"]) == 1
    told = capsys.readouterr().err
    assert named in told
    assert "name another --folder" in told
    assert told.count("\n") == 1
