"""Ablations: what a file may say, which runs it makes, and the table of what they came to."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from error_texts import naming

from bigbatch.cli import main
from bigbatch.errors import ConfigError, LaunchOptionError
from bigbatch.launch.ablate import inference, outcome
from bigbatch.launch.ablate.plan import choose, find_ablation, make_points, packaged_ablations
from bigbatch.launch.ablate.results import RunResult, StepResult, make_table, run_result
from bigbatch.launch.sweep.folder import SweepFolder, change_state, prepare
from bigbatch.launch.sweep.points import Point
from bigbatch.launch.tables import Table
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import all_keys, lookup
from bigbatch.trainer.run.folder import RunDir

ABLATION: dict[str, Any] = {
    "name": "small",
    "config": "quickstart",
    "options": {"data.probe_seconds": 0, "run.seed": 5},
    "steps": {
        "plain": {"run.epochs": 12, "optimizer.label_smoothing": 0.0},
        "smooth": {"optimizer.label_smoothing": 0.2},
        "short": {"run.epochs": 6, "schedule.warmup_epochs": 1},
    },
    "target_top1": 0.5,
    "ranks": 1,
    "timeout_minutes": 5,
}


def write(path: Path, **changes: Any) -> str:
    path.write_text(yaml.safe_dump(ABLATION | changes, sort_keys=False))
    return str(path)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "ablation.yaml")


def test_ablation_step_keeps_the_changes_of_those_before_it(file: str) -> None:
    points = make_points(find_ablation(file), folder=Path("out"), epochs=None, seeds=2, overrides=["--model.width=4"])
    found = [
        (point.number, point.values["step"], c.run.seed, c.run.epochs, c.optimizer.label_smoothing, c.run.directory)
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
    assert {point.config.model.width for point in points} == {4}
    assert {point.config.run.eval_every_epochs for point in points} == {1}, "a target is looked for"


def test_ablation_ranks_are_those_of_a_step_and_of_those_that_follow(file: str) -> None:
    steps = {"alone": {}, "two": {"ranks": 2}, "smooth": {"optimizer.label_smoothing": 0.2}}
    points = make_points(
        find_ablation(write(Path(file), steps=steps)), folder=Path("out"), epochs=None, seeds=1, overrides=[]
    )
    assert [point.ranks for point in points] == [1, 2, 2]
    assert {point.config.batch.global_batch_size for point in points} == {512}, "the batch is global"


def test_ablation_epochs_are_those_of_all_steps_and_without_a_target_the_last_one_is_evaluated(file: str) -> None:
    ablation = find_ablation(write(Path(file), target_top1=None))
    points = make_points(ablation, folder=Path("out"), epochs=3, seeds=1, overrides=[])
    assert [(p.config.run.epochs, p.config.run.eval_every_epochs) for p in points] == [(3, 3)] * 3
    assert points[2].config.schedule.warmup_epochs == 0.5


def test_ablation_step_ends_early_where_the_ablation_says_so_and_not_where_its_recipe_does(tmp_path: Path) -> None:
    recipe = {"base": "quickstart", "run": {"target_top1": 0.4, "stop_metric": "top1", "stop_after_evaluations": 2}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    patience = {"run.stop_metric": "top1", "run.stop_after_evaluations": 3}
    steps: dict[str, dict[str, Any]] = {"whole": {}, "target": {"run.target_top1": 0.3}, "patience": patience}
    ablation = find_ablation(
        write(tmp_path / "a.yaml", steps=steps, config=str(tmp_path / "recipe.yaml"), target_top1=None)
    )

    def ends(*overrides: str) -> list[tuple[Any, ...]]:
        points = make_points(ablation, folder=Path("out"), epochs=6, seeds=1, overrides=overrides)
        runs = [point.config.run for point in points]
        return [(r.target_top1, r.stop_metric, r.stop_after_evaluations, r.eval_every_epochs) for r in runs]

    assert ends() == [(None, None, None, 6), (0.3, None, None, 1), (0.3, "top1", 3, 1)]
    assert ends("--run.target_top1=0.2") == [(0.2, None, None, 1), (0.2, None, None, 1), (0.2, "top1", 3, 1)]
    with pytest.raises(ConfigError, match=naming("--run.eval_every_epochs")):
        ends("--run.eval_every_epochs", "2")


@pytest.mark.slow
@pytest.mark.parametrize("name", packaged_ablations())
def test_ablation_that_is_packaged_makes_points(name: str) -> None:
    assert find_ablation(name).name == name
    assert points_of(name)


@pytest.mark.long
def test_ablation_of_the_bag_ends_as_the_config_of_ten_epochs() -> None:
    """The last step and cifar10_10epochs are the same experiment, but for where and how often it writes."""
    *_, last = points_of("bag_of_tricks")
    stated = load_config(["--config", "cifar10_10epochs"])
    others = {key for key in all_keys() if lookup(last.config, key) != lookup(stated, key)}
    own = {"run.directory", "run.keep_checkpoints", "run.eval_every_epochs"}
    assert others == own | {"data.probe_seconds"}


def points_of(name: str) -> list[Point]:
    return make_points(find_ablation(name), folder=Path("out"), epochs=None, seeds=1, overrides=[])


def refusal(name: str) -> str:
    with pytest.raises((ConfigError, LaunchOptionError)) as caught:
        points_of(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"step": {}}, "top level: unknown key step; the nearest legal one is steps"),
        ({"steps": {}}, "steps: there is none"),
        ({"steps": {"a": 3}}, "steps: {'a': 3} must be names with keys and values, or {}, each"),
        ({"steps": {"a": {"model.celu": 1}}}, "a: unknown key model.celu; the nearest legal one is model.celu_alpha"),
        ({"steps": {"a,b": {}}}, "steps: 'a,b' holds a comma"),
        ({"options": {"run.directory": "x"}}, "options: run.directory: the ablation sets it itself: leave it out"),
        ({"target_top1": 94}, "target_top1: 94 must be a share of right answers, such as 0.94"),
        ({"ranks": 0}, "ranks: 0 must be a number from 1 on"),
        ({"inference": {"a": [3]}}, "inference: a: [3] must be words of bigbatch evaluate"),
        ({"steps": {"a": {"ranks": 0.5}}}, "a: ranks: 0.5 must be a number from 1 on"),
        ({"name": "a b"}, "name 'a b' must be letters"),
    ],
)
def test_ablation_file_is_refused_with_a_key_that_it_may_not_state(
    changes: dict[str, Any], complaint: str, file: str
) -> None:
    """The catalogue of this room's messages: elsewhere only what they name is asked."""
    message = refusal(write(Path(file), **changes))
    assert message.startswith(f"{file}: ")
    assert complaint in message


def test_ablation_step_that_cannot_be_trained_is_named(file: str) -> None:
    steps = {"fine": {}, "odd": {"batch.global_batch_size": 500}}
    assert refusal(write(Path(file), steps=steps)).startswith("step odd: batch.global_batch_size=500")


@pytest.mark.slow
def test_ablation_and_step_names_that_are_none(file: str) -> None:
    assert re.fullmatch(r"bag_of_trick: .*\bbag_of_tricks", refusal("bag_of_trick"))
    points = make_points(find_ablation(file), folder=Path("out"), epochs=None, seeds=2, overrides=[])
    assert [point.number for point in choose(points, "plain,short")] == [0, 2, 3, 5]
    with pytest.raises(LaunchOptionError, match=naming("--only", "'smoth'", "nearest is smooth")):
        choose(points, "smoth")


def test_ablation_counts_start_at_one(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", file, "--seeds", "0"]) == 1
    assert re.fullmatch(r"bigbatch: --seeds 0\b.*\n", capsys.readouterr().err)


def test_ablation_dry_run_tells_the_steps_and_writes_nothing(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", file, "--folder", "out", "--dry-run", "--model.width=4"]) == 0
    out = capsys.readouterr().out
    assert "small: 3 steps from quickstart, each on top of those before it" in out
    assert "  smooth: optimizer.label_smoothing=0.2\n" in out
    assert "  in all steps: --model.width=4\n" in out
    assert not Path("out").exists()


# what came out


def test_ablation_seconds_are_of_training_until_the_evaluation() -> None:
    """100 pictures a step: 10 steps at 500/s are 2 s, 5 at 250/s are 2 s, and 15 at 1,000/s are 1.5 s."""
    records = [
        {"kind": "start"},
        {"kind": "train", "step": 10, "images_per_second": 500.0},
        {"kind": "eval", "step": 10, "epoch": 1.0, "top1": 0.3},
        {"kind": "train", "step": 15, "images_per_second": 250.0},
        {"kind": "eval", "step": 15, "epoch": 1.5, "top1": 0.7},
        {"kind": "train", "step": 30, "images_per_second": 1000.0},
        {"kind": "eval", "step": 30, "epoch": 3.0, "top1": 0.6, "seconds": 0.25},
    ]
    stated = {"seed": 4, "global_batch_size": 100}
    assert run_result(records, **stated, target=0.5) == RunResult(4, 3.0, 5.5, 0.6, 4.0, 0.25)
    assert run_result(records, **stated, target=0.3).reached_seconds == 2.0
    assert run_result(records, **stated, target=0.8).reached_seconds is None
    assert run_result(records, **stated, target=None).reached_seconds is None
    with pytest.raises(ValueError, match="evaluation"):
        run_result(records[:2], **stated, target=None)


def test_ablation_run_that_went_on_from_a_checkpoint_has_each_step_once_and_says_so() -> None:
    """100 pictures a step: 10 at 500/s are 2 s; then stopped after step 13, of which step 15's rate tells."""
    records = [
        {"kind": "start", "step": 0},
        {"kind": "train", "step": 10, "images_per_second": 500.0},
        {"kind": "start", "step": 13},
        {"kind": "train", "step": 15, "images_per_second": 250.0},
        {"kind": "eval", "step": 15, "epoch": 1.5, "top1": 0.7},
    ]
    result = run_result(records, seed=4, global_batch_size=100, target=None)
    assert result == RunResult(4, 1.5, 4.0, 0.7, None, resumed=1)
    steps = [StepResult("a", {}, (result, RunResult(5, 1.5, 4.0, 0.7, None)), ())]
    assert make_table("t", steps, target=None).rows[0][1] == "2, 1 resumed"


@pytest.mark.parametrize(
    ("train", "evaluation"),
    [
        ({"images_per_second": 0}, {}),
        ({"images_per_second": -5.0}, {}),
        ({"images_per_second": math.nan}, {}),
        ({"images_per_second": "fast"}, {}),
        ({"step": 10**400, "images_per_second": 1.5}, {}),
        ({"step": 1e308, "images_per_second": 1e-308}, {}),
        ({"kind": "hint"}, {}),
        ({}, {"top1": "good"}),
        ({}, {"top1": math.nan}),
        ({}, {"top1": [0.5]}),
        ({}, {"top1": 1e308}),
        ({}, {"epoch": None}),
        ({}, {"epoch": 10**400}),
        ({}, {"seconds": "long"}),
    ],
    ids=str,
)
def test_ablation_run_whose_records_are_none_has_no_figures(
    train: dict[str, Any], evaluation: dict[str, Any], file: str
) -> None:
    ablation, folder = find_ablation(file), SweepFolder(Path("out"))
    points = make_points(ablation, folder=folder.path, epochs=None, seeds=1, overrides=[])[:1]
    prepare(folder, ablation.as_sweep(), points)
    change_state(folder, 0, state="done")
    lines = [
        {"kind": "train", "step": 144, "images_per_second": 1024.0} | train,
        {"kind": "eval", "epoch": 12.0, "top1": 0.6} | evaluation,
    ]
    folder.run(0).write_text(folder.run(0).metrics, "".join(json.dumps(line) + "\n" for line in lines))
    (step,) = outcome.collect(ablation, points, folder)
    assert step.runs == ()
    assert "damaged" in step.undone[0]


def test_ablation_table_by_hand() -> None:
    runs = tuple(RunResult(i, 10.0, s, t, r) for i, (s, t, r) in enumerate([(30.0, 0.9, 20.0), (10.0, 0.94, None)]))
    three = (*runs, RunResult(2, 10.0, 20.0, 0.92, 18.0, evaluation_seconds=2.5))
    steps = [
        StepResult("a", {}, three, ()),
        StepResult("b", {}, runs[1:], ("out of memory", "out of memory")),
        StepResult("c", {}, (), ("missing",)),
        StepResult("d", {}, (RunResult(0, 10.0, 40.0, 0.5, None),), ()),
    ]
    two = ("2.00", "2.00", "not told")  # of the step before, and of the first
    assert make_table("t", steps, target=0.93).rows == (
        ("a", "3", "10", "20.0", "10.0 to 30.0", "1.00", "1.00", "2.5", "92.00%", "2.00", "19.0, 2 of 3 runs"),
        ("b", "1, 2 not: out of memory", "10", "10.0", "10.0 to 10.0", *two, "94.00%", "one run", "not reached"),
        ("c", "0: missing", *[""] * 9),
        ("d", "1", "10", "40.0", "40.0 to 40.0", "0.25", "0.50", "not told", "50.00%", "one run", "not reached"),
    )
    plain = make_table("t", steps, target=None)
    assert {len(row) for row in (plain.head, *plain.rows)} == {10}


def test_ablation_inference_is_that_of_the_last_step_that_has_runs(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations are made up: 100 images/s, and 50 more with each word; the second run's cannot be folded,
    and none compiled."""
    forms = {"plain": ["--a=1"], "folded": ["--fold"], "half": [], "compiled": ["--compile"]}
    ablation, folder = find_ablation(write(Path(file), inference=forms)), SweepFolder(Path("out"))
    points = make_points(ablation, folder=folder.path, epochs=None, seeds=2, overrides=[])
    prepare(folder, ablation.as_sweep(), points)
    asked: list[list[str]] = []

    def evaluate(argv: list[str], *, log: Path, seconds: float) -> tuple[int, str]:
        _, run, *words = argv[argv.index("evaluate") :]
        asked.append([run, *words])
        assert (words[-1], seconds) == ("--json", 300)
        if "--fold" in words and ("points/4" in run or "--compile" in words):
            log.write_text("bigbatch: no norm to fold\n")
            return 1, "itself"
        record = {"model_images_per_second": 50.0 + 50 * len(words[:-1]), "top1": 0.5}
        log.write_text(f"in words\n{json.dumps(record)}\n")
        return 0, "itself"

    monkeypatch.setattr(inference, "run_logged", evaluate)
    assert inference.measure(ablation, points, folder) is None, "nothing is trained"
    for number in (0, 1, 4):  # the first seed of plain, both of smooth
        change_state(folder, number, state="done")
    found = inference.measure(ablation, points, folder)
    assert found is not None
    assert inference.make_table(found) == Table(
        "Inference with what smooth trained",
        inference.make_table(found).head,
        (
            ("plain", "2", "100", "100 to 100", "1.00", "1.00", "50.00%"),
            ("folded", "1, 1 not: no norm to fold", "150", "150 to 150", "1.50", "1.50", "50.00%"),
            ("half", "1, 1 not: no norm to fold", "150", "150 to 150", "1.00", "1.50", "50.00%"),
            ("compiled", "0: no norm to fold", *[""] * 5),
        ),
    )
    assert asked[:2] == [["out/points/1/run", "--a=1", "--json"], ["out/points/1/run", "--a=1", "--fold", "--json"]]
    asked.clear()
    assert inference.measure(ablation, points, folder) == found
    assert [words for run, *words in asked if run == "out/points/1/run"] == [
        ["--a=1", "--fold", "--compile", "--json"]
    ], "what was told is not measured again"
    assert inference.measure(find_ablation(write(Path(file))), points, folder) is None


@pytest.mark.long
def test_ablation_folder_is_of_one_ablation_and_takes_more_seeds(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs are made up: two are done, one failed; the files say so."""
    ablation, folder = find_ablation(file), SweepFolder(Path("out"))
    points = make_points(ablation, folder=folder.path, epochs=None, seeds=1, overrides=[])
    prepare(folder, ablation.as_sweep(), points)
    for point in points[:2]:
        change_state(folder, point.number, state="done")
        lines = [
            {"kind": "train", "step": 144, "images_per_second": 1024.0},
            {"kind": "eval", "epoch": 12.0, "top1": 0.6},
        ]
        run = folder.run(point.number)
        run.write_text(run.metrics, "".join(json.dumps(line) + "\n" for line in lines))
        run.write_text(run.summary, json.dumps({"device": "cpu", "torch": "2", "commit": "abc"}))
    change_state(folder, 2, state="failed", reason="out of memory")
    assert main(["ablate", file, "--folder", "out"]) == 3
    printed = capsys.readouterr().out
    assert "3 runs, 0 to do" in printed
    assert "1 of 3 runs failed" in printed
    text = Path("out/ablation.md").read_text()
    # 144 steps of 512 pictures at 1,024 a second
    row = "| smooth | 1 | 12 | 72.0 | 72.0 to 72.0 | 1.00 | 1.00 | not told | 60.00% | one run | 72.0 |"
    assert row in text
    assert "| short | 0: out of memory |" in text
    assert json.loads(Path("out/ablation.json").read_text())["conditions"]["commit"] == "abc"
    assert Path("out/ablation.png").stat().st_size > 1000
    assert main(["ablate", file, "--folder", "out", "--seeds", "2", "--dry-run"]) == 0
    assert main(["ablate", file, "--folder", "out", "--epochs", "3", "--dry-run"]) == 1
    assert capsys.readouterr().err == (
        "bigbatch: out/points/0/config.yaml has run.epochs=12 instead of 3: quickstart or what overrides it is not as "
        "it was when this folder was begun: put it back, or name another --folder\n"
    )
    RunDir(folder.point(1)).write_text(folder.run(1).metrics, '{"kind": "train", "step": 3}\n')
    (damaged,) = outcome.collect(ablation, points[1:2], folder)
    assert damaged.undone == ("its files are damaged: 'images_per_second' is not there",)


def test_ablation_says_nothing_that_a_terminal_obeys(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither by a step's name nor by a reason that somebody else put into the folder."""
    obeyed = "\x1b]0;owned\x07\x9b31m"
    write(Path(file), steps={f"plain{obeyed}": {}})
    points = make_points(find_ablation(file), folder=Path("out"), epochs=None, seeds=1, overrides=[])
    folder = SweepFolder(Path("out"))
    prepare(folder, find_ablation(file).as_sweep(), points)
    change_state(folder, 0, state="failed", reason=f"died{obeyed}\nafterwards")
    assert main(["ablate", file, "--folder", "out", "--dry-run"]) == 0
    assert main(["ablate", file, "--folder", "out"]) == 3
    out = capsys.readouterr().out
    assert "owned" in out
    assert not set("\x1b\x07\x9b") & set(out)


def test_ablation_inference_imports_what_the_ablation_names(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ablation, folder = find_ablation(write(Path(file), inference={"plain": []})), SweepFolder(Path("out"))
    own = ["--run.metrics={x: own.Score}"]
    points = make_points(ablation, folder=folder.path, epochs=None, seeds=1, overrides=own)
    prepare(folder, ablation.as_sweep(), points)
    change_state(folder, 0, state="done")
    asked: list[str] = []
    monkeypatch.setattr(inference, "_evaluate", lambda argv, **_: asked.extend(argv) or "not told")
    inference.measure(ablation, points, folder)
    assert asked[-3:] == ["out/points/0/run", "--run.metrics={x: own.Score}", "--json"]
