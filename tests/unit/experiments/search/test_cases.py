"""A sweep that tunes keys inside each case, with trainings whose top-1 is a closed form of the learning rate."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import yaml
from error_texts import naming

from bigbatch.cli import main
from bigbatch.errors import ConfigError, RunFolderError
from bigbatch.experiments import sweep
from bigbatch.experiments.engine.folder import SweepFolder
from bigbatch.experiments.report.collect import SweepResults, read_folder
from bigbatch.experiments.report.publish import report_on
from bigbatch.experiments.report.report import Report
from bigbatch.experiments.report.tuned import SearchResult, draw_tuned, read_searches, tuned_table
from bigbatch.experiments.search import rounds
from bigbatch.trainer.config.file import read_dumped

RATE, BATCH = "schedule.base_lr", "batch.global_batch_size"
OPTIMA = {"lars": 4.0, "sgd": 0.125}
"""Rates at which the played trainings are best, at batch 512; they follow the batch."""
SWEEP: dict[str, Any] = {
    "name": "tuned",
    "config": "quickstart",
    "cases": {"LARS": {"optimizer.name": "lars"}, "SGD": {"optimizer.name": "sgd"}},
    "epochs": 3,
    "seeds": 2,
    "search": {
        "trials": 8,
        "epochs": 1,
        "space": {RATE: "log:0.01:1"},
        "cases": {"LARS": {RATE: "log:0.5:32"}},
    },
}


class Killed(Exception):
    """Stands for a kill of the sweep: nothing of it handles this."""


class Tuned:
    """A sweep's file, and its folder whose trainings are played: top-1 falls with the distance from the optimum."""

    def __init__(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file, self.folder = path / "tuned.yaml", SweepFolder(path / "out")
        self.trials, self.points = list[tuple[str, float, int]](), list[int]()
        self.killed_after, self.bad_rate = math.inf, math.inf
        monkeypatch.setattr(rounds, "run_points", self._run)
        monkeypatch.setattr(sweep, "run_points", self._run)
        monkeypatch.setattr(sweep, "require_images", lambda *_, **__: None)
        monkeypatch.setattr(sweep, "report_on", self._report)
        self.reports = False

    def _run(self, plan: Any, points: Any, folder: SweepFolder, *, on_end: Any, **_: Any) -> None:
        for point in points:
            config = point.config
            if folder.path == self.folder.path:
                self.points.append(point.number)
            else:
                if len(self.trials) == self.killed_after:
                    raise Killed
                self.trials.append((config.optimizer.name, config.schedule.base_lr, config.run.seed))
            folder.write_config(point)
            if config.schedule.base_lr > self.bad_rate:
                on_end(point, folder.change_state(point.number, state="failed", reason="the loss is nan at step 7"))
                continue
            optimum = OPTIMA[config.optimizer.name] * config.batch.global_batch_size / 512
            top1 = 1 / (1 + math.log(config.schedule.base_lr / optimum) ** 2)
            run = folder.run(point.number)
            run.path.mkdir(parents=True)
            records = (
                {"kind": "train", "step": 10, "epoch": 1.0, "images_per_second": 100.0},
                {"kind": "eval", "step": 10, "epoch": 1.0, "top1": top1, "loss": 1 - top1},
            )
            run.metrics.write_text("".join(json.dumps(each) + "\n" for each in records))
            run.config.write_text(folder.config(point.number).read_text())
            run.summary.write_text(json.dumps({"global_batch_size": 512, "num_nodes": 1, "world_size": 1}))
            on_end(point, folder.change_state(point.number, state="done"))

    def go(self, *words: str, code: int = 0, **changes: Any) -> None:
        """Run the command with a changed file."""
        self.trials, self.points = [], []
        self.file.write_text(yaml.safe_dump(SWEEP | changes, sort_keys=False))
        assert main(["sweep", str(self.file), "--folder", str(self.folder.path), *words]) == code

    def _report(self, folders: Any, **options: Any) -> None:
        if self.reports:
            report_on(folders, **options)

    def rates(self) -> list[float]:
        """The rates with which the points of the sweep trained."""
        return [read_dumped(self.folder.config(n).read_text())[RATE] for n in self.folder.numbers()]


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    return Tuned(tmp_path, monkeypatch)


def test_each_case_is_tuned_with_equal_budgets_and_then_compared_at_its_best(
    tuned: Tuned, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned.go("--dry-run")
    shown = capsys.readouterr().out
    assert "searches of 2 cases, 16 trials: 16 epochs; then 4 points: 12 epochs; in all 28 epochs" in shown
    assert "search of SGD: schedule.base_lr from 0.01 to 1 (log), 1 epoch a trial: to run" in shown
    assert not tuned.folder.path.exists()
    tuned.reports = True
    tuned.go()
    names = [name for name, _, _ in tuned.trials]
    assert (names.count("lars"), names.count("sgd")) == (8, 8)
    (seed,) = {seed for _, _, seed in tuned.trials}
    assert seed not in (0, 1), "no point has the seed by which its values were chosen"
    # the same shares of both ranges, in the same order
    lars, sgd = ([rate for name, rate, _ in tuned.trials if name == each] for each in ("lars", "sgd"))
    shares = [
        [math.log(r / low) / math.log(64 if low == 0.5 else 100) for r in each]
        for low, each in ((0.5, lars), (0.01, sgd))
    ]
    assert shares[0] == pytest.approx(shares[1], abs=1e-3)
    nearest = [min(each, key=lambda rate, o=o: abs(math.log(rate / o))) for each, o in ((lars, 4.0), (sgd, 0.125))]
    assert tuned.rates() == pytest.approx(nearest * 2), "both seeds of each case have its best value"
    assert tuned.points == [0, 1, 2, 3]
    results = read_searches(tuned.folder.path)
    assert [(each.name, len(each.trials), each.epochs, each.edges) for each in results] == [
        ("LARS", 8, 1, []),
        ("SGD", 8, 1, []),
    ]
    text = (tuned.folder.path / "report/report.md").read_text()
    assert "| LARS | 8 | 8 x 1 |" in text
    assert "Tuned inside each case, on the images of the evaluation" in text
    assert "report/tuned.png" in str(list(tuned.folder.path.glob("report/*.png")))
    tuned.go()
    assert (tuned.trials, tuned.points) == ([], [])


@pytest.mark.long
def test_best_value_at_an_end_of_its_range_is_remarked(tuned: Tuned, capsys: pytest.CaptureFixture[str]) -> None:
    search = SWEEP["search"] | {"cases": {"LARS": {RATE: "log:8:9"}}}
    tuned.go(search=search | {"trials": 24}, seeds=1)
    results = read_searches(tuned.folder.path)
    table = tuned_table(results, name=None)
    remark = "the best schedule.base_lr is at an end of log:8:9: widen it"
    assert table.rows[0][table.head.index("remark")] == remark
    capsys.readouterr()
    tuned.go("--dry-run", search=search | {"trials": 24}, seeds=1)
    assert f"; {remark}" in capsys.readouterr().out


@pytest.mark.long
def test_search_that_was_killed_continues_with_the_same_trials(tuned: Tuned, tmp_path: Path) -> None:
    tuned.killed_after = 11
    tuned.go(code=7)
    before, tuned.killed_after = tuned.trials, math.inf
    tuned.go()
    parts = before + tuned.trials
    tuned.folder = SweepFolder(tmp_path / "whole")
    tuned.go()
    assert parts == tuned.trials
    assert len(parts) == 16


@pytest.mark.long
def test_search_grows_and_keeps_the_trials_of_unchanged_cases(tuned: Tuned) -> None:
    tuned.go()
    first = tuned.rates()[:2]
    cases = SWEEP["cases"] | {"momentum": {"optimizer.name": "sgd", "optimizer.momentum": 0.8}}
    tuned.go(cases=cases)
    assert len(tuned.trials) == 8, "only the new case is tuned"
    assert tuned.points == [4, 5]
    tuned.go(cases=cases, search=SWEEP["search"] | {"trials": 10})
    assert len(tuned.trials) == 6, "two more for each case"
    assert tuned.rates()[:2] == first, "points of another value are new ones"
    tuned.go("--seeds", "3", "--only", "SGD")
    assert {name for name, _, _ in tuned.trials} <= {"sgd"}


@pytest.mark.long
def test_each_value_of_the_grid_has_its_own_search(tuned: Tuned) -> None:
    tuned.go(grid={BATCH: [256, 1024]}, seeds=1, search=SWEEP["search"] | {"rounds": 2, "trials": 12})
    assert len(tuned.trials) == 4 * 12
    small, large = (read_searches(tuned.folder.path)[index].best_values[RATE] for index in (0, 1))
    assert float(small) == pytest.approx(2, rel=0.35)
    assert float(large) == pytest.approx(8, rel=0.35)


def test_case_whose_trials_all_fail_does_not_end_the_others(tuned: Tuned) -> None:
    tuned.bad_rate = 0.2
    tuned.go(code=3, seeds=1, search=SWEEP["search"] | {"cases": {"LARS": {RATE: "log:1:2"}}})
    states = [tuned.folder.read_state(number) for number in (0, 1)]
    assert [state["state"] for state in states] == ["failed", "done"]
    reason = "search: all 8 trials failed, 8 of them for this reason: the loss is nan at step 7; change its range, or "
    assert states[0]["reason"].startswith(f"{reason}remove {tuned.folder.path}/")
    results = read_folder(tuned.folder.path)
    assert Report([results], []).searches[0][1][0].best is None  # type: ignore[list-item]
    tuned.bad_rate = math.inf
    tuned.go(seeds=1)  # with the range that SWEEP states
    assert [tuned.folder.state_of(number) for number in (0, 1)] == ["done", "done"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"search": {"space": {RATE: "log:1:2"}}}, ("search: trials is missing",)),
        ({"search": {"trials": 2, "spaces": {}}}, ("search: unknown key spaces", "space")),
        ({"search": {"trials": 0, "space": {RATE: "log:1:2"}}}, ("trials: 0 must be",)),
        ({"search": {"trials": 2, "rounds": 3, "space": {RATE: "log:1:2"}}}, ("rounds: 3 exceed trials: 2",)),
        ({"search": {"trials": 2, "metric": "top5"}}, ("metric: 'top5' must be",)),
        ({"search": {"trials": 2, "cases": {"LARS": {RATE: "log:1:2"}}}}, ("case SGD has no key to tune",)),
        ({"search": {"trials": 2, "cases": {"Lars": {}}, "space": {RATE: "log:1:2"}}}, ("'Lars' must be one of LARS",)),
        ({"search": {"trials": 2, "space": {RATE: "log:9:2"}}}, ("search: LARS: schedule.base_lr=log:9:2", "swap")),
        ({"search": {"trials": 2, "space": {"optimizer.momentum": "linear:0:2"}}}, ("at 2, optimizer.momentum=2",)),
        ({"search": {"trials": 2, "space": {"optimizer.name": "choice:lars,sgd"}}}, ("also in case LARS: keep one",)),
        ({"scale": "sqrt"}, ("schedule.base_lr is tuned at each batch", "scale: sqrt")),
        ({"epochs": None, "steps": 10}, ("steps and search:", "remove one")),
        ({"where": "slurm"}, ("where: slurm and search:", "remove one")),
    ],
)
def test_mistakes_of_the_section_are_one_clear_line(
    tuned: Tuned, changes: dict[str, Any], complaint: tuple[str]
) -> None:
    tuned.file.write_text(yaml.safe_dump({**SWEEP, **changes}))
    with pytest.raises(ConfigError, match=naming(*complaint)):
        sweep.main([str(tuned.file), "--folder", str(tuned.folder.path)])
    assert not tuned.folder.path.exists()


TRIAL: dict[str, Any] = {"values": {RATE: "0.5"}, "state": "done", "result": 0.75}
SOUND: dict[str, Any] = {
    "values": {"case": "SGD"},
    "folder": "searches/a",
    "epochs": 1,
    "metric": "top1",
    "space": {RATE: "log:0.1:1"},
    "trials": [TRIAL],
    "best": 0,
    "edges": [RATE],
    "reason": "",
}


@pytest.mark.parametrize(
    "damage",
    [
        *({"edges": ["nokey"]}, {"values": {"case": 3}}, {"values": [1]}, {"space": {}}, {"best": -1}, {"best": 1}),
        *({"trials": [TRIAL | {"values": {RATE: rate}}]} for rate in ("abc", "nan", "0", "-1", 0.5)),
        {"trials": [TRIAL | {"values": {}}]},
    ],
)
def test_damaged_result_is_not_drawn(tmp_path: Path, damage: dict[str, Any]) -> None:
    (tmp_path / "tuned.json").write_text(json.dumps([SOUND]))
    assert draw_tuned(read_searches(tmp_path)).axes
    (tmp_path / "tuned.json").write_text(json.dumps([SOUND | damage]))
    with pytest.raises(RunFolderError, match="is not readable"):
        read_searches(tmp_path)


def test_listed_numbers_are_drawn_at_their_values(tmp_path: Path) -> None:
    trials = [TRIAL | {"values": {RATE: rate}} for rate in ("8", "16", "128")]
    result = SOUND | {"space": {RATE: "choice:8,16,128"}, "trials": trials, "edges": []}
    (panel,) = draw_tuned([SearchResult(**result)]).axes
    assert panel.collections[0].get_offsets()[:, 0].tolist() == [8, 16, 128]  # type: ignore[index]


@pytest.mark.parametrize("damage", ['[{"values": {}}]', "[", '{"a": 1}', "[1]"])
def test_damaged_results_name_their_file(tmp_path: Path, damage: str) -> None:
    (tmp_path / "tuned.json").write_text(damage)
    with pytest.raises(RunFolderError, match=naming(f"{tmp_path}/tuned.json is not readable", "remove it")):
        read_searches(tmp_path)


@pytest.mark.long
def test_commit_in_the_middle_of_a_sweep_does_not_separate_seeds(tuned: Tuned) -> None:
    tuned.go()
    for number in tuned.folder.numbers():
        path = tuned.folder.run(number).summary
        path.write_text(json.dumps(json.loads(path.read_text()) | {"commit": "abc" if number < 2 else "def"}))
    results = read_folder(tuned.folder.path)
    assert isinstance(results, SweepResults)
    assert [len(cell.runs) for cell in results.comparison.cells] == [2, 2]
    assert any("commit differs (abc; def)" in line for line in Report([results], []).findings)
