"""A sweep whose file changed continues in its folder: what it trained is kept, and only the rest runs."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from error_texts import naming
from small_sweep import states

from bigbatch.cli import main
from bigbatch.experiments import sweep
from bigbatch.experiments.engine import engine
from bigbatch.experiments.engine.folder import SweepFolder, values_of
from bigbatch.experiments.engine.plan import read_plan
from bigbatch.experiments.engine.points import make_points
from bigbatch.experiments.report.collect import SweepResults, read_folder
from bigbatch.trainer.config import file
from bigbatch.trainer.config.file import read_experiment

BATCH = "batch.global_batch_size"
MUON = {"optimizer.name": "muon", "schedule.base_lr": 0.1}
SWEEP: dict[str, Any] = {
    "name": "paper",
    "config": "quickstart",
    "options": {"data.loader": "synthetic", "data.num_synthetic_samples": 2048},
    "cases": {"SGD": {"optimizer.name": "sgd"}, "Muon": MUON},
    "grid": {BATCH: [128, 512]},
    "epochs": 1,
}


class Paper:
    """A sweep's file, and its folder whose trainings only note that they ran."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self.folder, self.ran = path / "paper.yaml", SweepFolder(path / "out"), list[int]()
        monkeypatch.setattr(sweep, "run_points", self._run)
        monkeypatch.setattr(sweep, "report_on", lambda *_, **__: None)

    def _run(self, plan: Any, points: Any, folder: SweepFolder, **_: Any) -> None:
        self.ran = [point.number for point in points]
        for point in points:
            folder.write_config(point)
            folder.change_state(point.number, state="done")

    def go(self, *words: str, code: int = 0, **changes: Any) -> list[int]:
        """Run the command with a changed file; return the points that ran."""
        self.ran = []
        self.file.write_text(yaml.safe_dump(SWEEP | changes, sort_keys=False))
        assert main(["sweep", str(self.file), "--folder", str(self.folder.path), *words]) == code
        return self.ran


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Paper:
    return Paper(tmp_path, monkeypatch)


def test_sweep_that_grows_keeps_what_it_trained_and_runs_the_rest(
    paper: Paper, capsys: pytest.CaptureFixture[str]
) -> None:
    """An inserted batch, another rate, a case and a seed: names and numbers of the others stay."""
    assert paper.go() == [0, 1, 2, 3]
    cases = {
        "SGD": SWEEP["cases"]["SGD"],
        "Lion": {"optimizer.name": "lion"},
        "Muon": MUON | {"schedule.base_lr": 0.05},
    }
    changes: dict[str, Any] = {"cases": cases, "grid": {BATCH: [128, 256, 512]}}
    capsys.readouterr()
    assert paper.go("--dry-run", **changes) == []
    lines = capsys.readouterr().out.splitlines()
    assert "cases.Muon.schedule.base_lr: 0.05, was 0.1" in lines
    assert "cases.Lion: new" in lines
    assert f"grid.{BATCH}: [128, 256, 512], was [128, 512]" in lines
    assert "the sweep has changed; its points: 2 kept, 0 pending, 5 new, 2 changed, 0 gone" in lines
    rows = [line.split(maxsplit=1)[0] for line in lines if "; pending" in line or "kept; " in line]
    assert rows == ["0", "4", "1", "5", "6", "7", "8", "9", "10"], "in the order of the file"
    assert any(line.endswith("changed, was point 3; pending") for line in lines)
    assert paper.go(**changes) == [4, 5, 6, 7, 8, 9, 10]
    assert paper.go(**changes) == []
    assert paper.go("--seeds", "2", **changes) == [*range(11, 20)]
    assert paper.go(**changes | {"cases": cases | {"Muon": MUON}}) == [2 + 18], "both older batches are in the folder"


def test_sweep_that_shrinks_leaves_points_in_the_folder_and_out_of_the_report(
    paper: Paper, capsys: pytest.CaptureFixture[str]
) -> None:
    paper.go("--only", "0-2")
    capsys.readouterr()
    paper.go("--only", "0-2", cases={"Muon": MUON})
    told = capsys.readouterr().out
    assert "1 kept, 1 pending, 0 new, 0 changed, 2 gone" in told
    assert "cases.SGD: gone" in told
    assert paper.folder.numbers() == [0, 1, 2, 3], "nothing is deleted"
    results = read_folder(paper.folder.path)
    assert isinstance(results, SweepResults)
    assert (results.waiting, [shown for shown, _ in results.unmeasured]) == (
        {"pending": 1},
        [f"case=Muon, {BATCH}=128"],
    )
    assert paper.go("--prune", cases={"Muon": MUON}) == [3]
    assert paper.folder.numbers() == [2, 3]
    assert paper.go() == [0, 1], "gone for good"


def test_point_that_comes_back_is_kept_and_one_that_is_renamed_too(paper: Paper) -> None:
    paper.go()
    paper.go(cases={"SGD": SWEEP["cases"]["SGD"]})
    assert paper.go(cases={"sgd": SWEEP["cases"]["SGD"], "Muon": MUON}) == []
    values = [paper.folder.read_state(number)["values"]["case"] for number in paper.folder.numbers()]
    assert values == ["sgd", "sgd", "Muon", "Muon"]


def test_rate_that_follows_the_batch_is_named_if_an_inserted_batch_changes_it(
    paper: Paper, capsys: pytest.CaptureFixture[str]
) -> None:
    """`scale` states rates for the first batch of the grid."""
    sgd: dict[str, Any] = {"cases": {"SGD": {"schedule.base_lr": 0.5}}, "scale": "linear"}
    paper.go(**sgd)
    capsys.readouterr()
    paper.go("--dry-run", **sgd, grid={BATCH: [64, 128, 512]})
    assert "schedule.base_lr: 1.0, was 0.5 (point 0: " in capsys.readouterr().out


def test_sweep_whose_other_keys_leave_nothing_as_it_was_is_refused(
    paper: Paper, capsys: pytest.CaptureFixture[str]
) -> None:
    """As after an option that was stated the first time only."""
    paper.go("--optimizer.label_smoothing=0.2")
    before = states(paper.folder)
    assert paper.go(code=1) == []
    error = capsys.readouterr().err
    assert all(part in error for part in ("holds another sweep", "options", "label_smoothing", "--folder"))
    assert states(paper.folder) == before


@pytest.mark.parametrize("is_old", [False, True])
def test_folder_of_an_earlier_release_continues_and_pins_no_second_mode_in_silence(
    is_old: bool, paper: Paper, capsys: pytest.CaptureFixture[str]
) -> None:
    auto: dict[str, Any] = {"options": SWEEP["options"] | {"compute.mode": "auto"}}
    paper.go("--only", "0,1", **auto)
    for number in paper.folder.numbers() if is_old else ():
        state = paper.folder.read_state(number)
        paper.folder.write_state(number, {key: state[key] for key in state if key not in ("index", "machine_keys")})
    assert "compute.mode" not in capsys.readouterr().out
    ran = paper.go(grid={BATCH: [128, 512], "ranks": [1, 2]}, **auto)
    assert len(ran) == 6, "the points of one rank that ran are kept, though a case has two now"
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("compute.mode: ")]
    assert len(told) == 1
    assert "auto in the kept points 0, 1, which the other points would have as 64, 256: " in told[0]
    assert paper.go("--only", "0,1", **auto) == [], "and with one number of ranks again"


@pytest.mark.parametrize(("old", "new"), [("eager", "auto"), ("auto", "eager"), (24, "eager")])
def test_sweep_whose_mode_was_edited_is_refused(
    old: object, new: object, paper: Paper, capsys: pytest.CaptureFixture[str]
) -> None:
    paper.go(options=SWEEP["options"] | {"compute.mode": old})
    paper.go(options=SWEEP["options"] | {"compute.mode": new}, code=1)
    assert re.search(naming("holds another sweep", "options", "compute.mode", "--folder"), capsys.readouterr().err)


def test_points_without_settings_of_their_own_each_keep_one_folder(paper: Paper) -> None:
    twins: dict[str, Any] = {"cases": {"one": {}, "other": {}}}
    paper.go(**twins)
    assert paper.go(cases={"other": {}, "third": {}, "one": {}}) == [4, 5]
    plan = read_plan(paper.file)
    assert [point.number for point in make_points(plan, folder=paper.folder.path)] == [0, 1, 2, 3, 4, 5]


def test_prune_that_is_interrupted_leaves_no_half_of_a_point(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its value may come back: then it is trained again. The next --prune removes what the first one left."""
    paper.go()
    with monkeypatch.context() as broken:
        broken.setattr(engine, "rmtree", lambda path: (path / "config.yaml").unlink() or exit(137))
        with pytest.raises(SystemExit):
            paper.go("--prune", grid={BATCH: [128]})
    assert len(paper.folder.numbers()) == 2, "both that are gone have left their places"
    assert len(paper.go("--prune")) == 2
    assert not list(paper.folder.path.glob(".leaving-*"))


def test_files_of_points_are_parsed_once(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    """YAML takes 30 ms for each. The launcher loads one of them."""
    paper.go()
    parse, parsed = file.parse_yaml, list[str]()
    monkeypatch.setattr(file, "parse_yaml", lambda text: parsed.append(str(text)) or parse(text))
    paper.go()
    assert len([text for text in parsed if "out/points/" in text]) <= 4 + 1


@pytest.mark.parametrize("name", ["quickstart", "imagenet/resnet50_32k"])
def test_values_of_a_config_are_what_its_file_holds(name: str) -> None:
    config = read_experiment(name).with_values({"run.metrics": {"x": "own.Score"}}).config
    assert repr(values_of(config)) == repr(file.read_dumped(file.dump_config(config)))


def test_folder_that_was_moved_is_named(paper: Paper, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paper.go()
    paper.folder.path.rename(tmp_path / "moved")
    paper.folder = SweepFolder(tmp_path / "moved")
    paper.go(code=1)
    error = capsys.readouterr().err
    assert re.search(naming("run.directory", "out/points/0/run", "--folder"), error)
