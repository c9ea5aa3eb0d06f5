"""Cases of a sweep: keys that change together, one upon the other, and rates that follow the batch."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from error_texts import naming

from bigbatch.cli import main
from bigbatch.errors import ConfigError
from bigbatch.experiments.engine.plan import SweepPlan, read_plan
from bigbatch.experiments.engine.points import Point, make_points
from bigbatch.trainer.config import strict_yaml
from bigbatch.trainer.config.file import PACKAGED, load_config
from bigbatch.trainer.config.schema import KEYS, lookup

STEPS: dict[str, Any] = {
    "config": "quickstart",
    "options": {"data.probe_seconds": 0, "run.seed": 5, "model.options.width": 4},
    "cumulative": True,
    "cases": {
        "plain": {"run.epochs": 12, "optimizer.label_smoothing": 0.0},
        "smooth": {"optimizer.label_smoothing": 0.2},
        "short": {"run.epochs": 6, "schedule.warmup_epochs": 1},
    },
    "target_top1": 0.5,
}


def plan_of(tmp_path: Path, *, base: dict[str, Any] = STEPS, **changes: Any) -> SweepPlan:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({**base, **changes}, sort_keys=False))
    return read_plan(path)


def points_of(tmp_path: Path, *, base: dict[str, Any] = STEPS, **changes: Any) -> list[Point]:
    return make_points(plan_of(tmp_path, base=base, **changes), folder=Path("out"))


def test_case_keeps_the_changes_of_those_before_it_where_cases_are_cumulative(tmp_path: Path) -> None:
    points = points_of(tmp_path, seeds=2)
    found = [
        (point.number, point.values["case"], c.run.seed, c.run.epochs, c.optimizer.label_smoothing, c.run.directory)
        for point in points
        for c in [point.config]
    ]
    assert found == [
        (0, "plain", 5, 12, 0.0, "out/points/0/run"),
        (1, "smooth", 5, 12, 0.2, "out/points/1/run"),
        (2, "short", 5, 6, 0.2, "out/points/2/run"),
        (3, "plain", 6, 12, 0.0, "out/points/3/run"),
        (4, "smooth", 6, 12, 0.2, "out/points/4/run"),
        (5, "short", 6, 6, 0.2, "out/points/5/run"),
    ]
    assert {point.config.model.options["width"] for point in points} == {4}
    assert {point.config.run.eval_every_epochs for point in points} == {1}, "a target is looked for"
    alone = points_of(tmp_path, cumulative=False)
    assert [point.config.optimizer.label_smoothing for point in alone] == [0.0, 0.2, 0.1]


def test_case_states_ranks(tmp_path: Path) -> None:
    steps = {"alone": None, "two": {"ranks": 2}, "smooth": {"optimizer.label_smoothing": 0.2}}
    points = points_of(tmp_path, cases=steps)
    assert [point.ranks for point in points] == [1, 2, 2]
    assert {point.config.batch.global_batch_size for point in points} == {512}, "the batch is global"


def test_sweep_epochs_are_those_of_all_points_with_their_schedule_in_proportion(tmp_path: Path) -> None:
    points = points_of(tmp_path, target_top1=None, epochs=3)
    assert [(p.config.run.epochs, p.config.run.eval_every_epochs) for p in points] == [(3, 3)] * 3
    assert points[2].config.schedule.warmup_epochs == 0.5


def test_point_ends_early_where_the_sweep_says_so_and_not_where_its_recipe_does(tmp_path: Path) -> None:
    recipe = {"base": "quickstart", "run": {"target_top1": 0.4, "stop_metric": "top1", "stop_after_evaluations": 2}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    patience = {"run.stop_metric": "top1", "run.stop_after_evaluations": 3}
    steps: dict[str, dict[str, Any]] = {"whole": {}, "target": {"run.target_top1": 0.3}, "patience": patience}
    stated = {"cases": steps, "config": str(tmp_path / "recipe.yaml"), "target_top1": None, "epochs": 6}
    runs = [point.config.run for point in points_of(tmp_path, **stated)]
    found = [(r.target_top1, r.stop_metric, r.stop_after_evaluations, r.eval_every_epochs) for r in runs]
    assert found == [(None, None, None, 6), (0.3, None, None, 1), (0.3, "top1", 3, 1)]
    with pytest.raises(ConfigError, match=naming("run.eval_every_epochs", "target_top1")):
        plan_of(tmp_path, target_top1=0.5, options={"run.eval_every_epochs": 2})


OPTIMIZERS: dict[str, Any] = {
    "config": "pilots/jia",  # which states LARS's trust coefficient
    "cases": {
        "LARS": {"optimizer.name": "lars", "schedule.base_lr": 2.0},
        "SGD": {"optimizer.name": "sgd", "schedule.base_lr": 0.1},
        "Muon": {"optimizer.name": "muon", "schedule.base_lr": 0.01},
        "own rate": {"optimizer.name": "sgd", "schedule.base_lr": 0.1},
    },
    "grid": {"batch.global_batch_size": [512, 1024, 2048]},
    "scale": "sqrt",
}


def rates(points: list[Point]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for point in points:
        found.setdefault(str(point.values.get("case")), []).append(round(point.config.schedule.base_lr, 6))
    return found


def test_case_couples_an_optimizer_and_its_rate_and_drops_what_is_for_others(tmp_path: Path) -> None:
    points = points_of(tmp_path, base=OPTIMIZERS)
    assert len(points) == 12
    root = 2**0.5
    assert rates(points)["LARS"] == [2.0, round(2 * root, 6), 4.0]
    assert rates(points)["SGD"] == [0.1, round(0.1 * root, 6), 0.2]
    sgd = next(point.config for point in points if point.values["case"] == "SGD")
    assert (sgd.optimizer.options, sgd.optimizer.momentum) == ({"nesterov": False}, 0.951807)
    assert rates(points_of(tmp_path, base=OPTIMIZERS, scale="linear"))["SGD"] == [0.1, 0.2, 0.4]
    assert rates(points_of(tmp_path, base=OPTIMIZERS, scale=None))["SGD"] == [0.1] * 3


def test_rate_of_a_case_that_states_its_batch_is_for_that_batch(tmp_path: Path) -> None:
    cases = [
        {"batch.global_batch_size": 512, "schedule.base_lr": 1.0},
        {"batch.global_batch_size": 2048, "schedule.base_lr": 3.0},
        {"batch.global_batch_size": 2048},
    ]
    points = points_of(tmp_path, base=OPTIMIZERS, cases=cases, grid={}, options={"schedule.base_lr": 2.0})
    assert [point.config.schedule.base_lr for point in points] == [1.0, 3.0, 4.0]
    assert [point.values["case"] for point in points] == [
        "batch.global_batch_size=512, schedule.base_lr=1.0",
        "batch.global_batch_size=2048, schedule.base_lr=3.0",
        "batch.global_batch_size=2048",
    ]


def test_name_of_a_case_in_a_list_is_what_differs(tmp_path: Path) -> None:
    cases = [{"optimizer.name": name, "optimizer.momentum": 0.8} for name in ("sgd", "lars")]
    names = [point.values["case"] for point in points_of(tmp_path, base=OPTIMIZERS, cases=cases, grid={})]
    assert names == ["optimizer.name=sgd", "optimizer.name=lars"]


def test_list_of_no_case_is_the_same_as_no_list(tmp_path: Path) -> None:
    assert plan_of(tmp_path, cases=[]) == plan_of(tmp_path, cases={})


def test_work_of_making_points_is_a_config_each_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dry run of 10,000 points once parsed a file and built a parser for each."""
    parsed: list[object] = []
    load = strict_yaml.yaml.load
    monkeypatch.setattr(strict_yaml.yaml, "load", lambda *words: parsed.append(words) or load(*words))
    counts = []
    for seeds in (1, 50):
        parsed.clear()
        points = points_of(tmp_path, base=OPTIMIZERS, seeds=seeds)
        assert len(points) == 12 * seeds
        counts.append(len(parsed))
    assert counts[0] == counts[1] < 10


@pytest.mark.slow
def test_ablation_of_the_bag_ends_as_the_config_of_ten_epochs() -> None:
    """The last case and cifar10_10epochs are the same experiment, but for where and how often it writes."""
    *_, last = make_points(read_plan(PACKAGED / "sweeps/bag_of_tricks.yaml"), folder=Path("out"))
    stated = load_config(["--config", "cifar10_10epochs"])
    others = {key for key in KEYS if lookup(last.config, key) != lookup(stated, key)}
    assert others == {"run.directory", "run.eval_every_epochs", "data.probe_seconds", "compute.mode_keeps"}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["sweeq.yaml"], ("sweeq.yaml", "no such file")),
        (["scalin"], ("scalin", "nearest packaged one is scaling")),
        (["FILE", "--only", "smoth"], ("--only", "'smoth'", "nearest is smooth")),
        (["FILE", "--seeds", "0"], ("seeds: 0",)),
        (["FILE", "--epochs", "0"], ("epochs: 0",)),
        (["FILE", "--parallel", "0"], ("--parallel 0 must be at least 1",)),
        (["FILE", "extra"], ("extra is not an option: state a key",)),
        (["FILE", "--run.epoch=3"], ("run.epoch", "run.epochs")),
        (["FILE", "--optimizer.label_smoothing=0.1"], ("--optimizer.label_smoothing", "case plain")),
        (["FILE", "--config=quickstart"], ("--config quickstart",)),
    ],
)
def test_sweep_command_line_that_is_wrong_is_refused_in_a_line(
    words: list[str], named: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_of(tmp_path)
    words = [word.replace("FILE", str(tmp_path / "small.yaml")) for word in words]
    assert main(["sweep", *words, "--folder", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert re.search(naming(*named), error)
    assert error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_sweep_dry_run_tells_the_cases_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_of(tmp_path)
    command = ["sweep", str(tmp_path / "small.yaml"), "--folder", str(tmp_path / "out"), "--dry-run"]
    assert main([*command, "--only", "short,0", "--run.log_every_steps=7", "--seeds", "2"]) == 0
    out = capsys.readouterr().out
    assert "smooth: optimizer.label_smoothing=0.2\n" in out
    assert [line.split()[0] for line in out.splitlines() if "pending" in line] == ["0", "2", "5"]
    assert not (tmp_path / "out").exists()
