"""How fast what a sweep trained answers; evaluations are made up."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigbatch.experiments import inference
from bigbatch.experiments.engine.folder import SweepFolder
from bigbatch.experiments.engine.plan import SweepPlan, read_plan
from bigbatch.experiments.engine.points import Point, make_points

FOLDER = SweepFolder(Path("out"))


def begin(path: Path, **changes: Any) -> tuple[SweepPlan, list[Point]]:
    cases = {"plain": {}, "smooth": {"optimizer.label_smoothing": 0.2}, "short": {"run.epochs": 6}}
    stated = {"config": "quickstart", "cumulative": True, "cases": cases, "seeds": 2, "timeout_minutes": 5}
    (path / "small.yaml").write_text(yaml.safe_dump({**stated, **changes}, sort_keys=False))
    plan = read_plan(path / "small.yaml")
    points = make_points(plan, folder=FOLDER.path)
    FOLDER.prepare(plan, points)
    return plan, points


@pytest.fixture(autouse=True)
def work_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_inference_is_that_of_the_last_case_that_has_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """100 images/s, and 50 more with each word; the second run's cannot be folded, and none compiled."""
    forms = {"plain": ["--a=1"], "folded": ["--fold"], "half": [], "compiled": ["--compile"]}
    plan, points = begin(tmp_path, inference=forms)
    asked: list[list[str]] = []

    def evaluate(argv: list[str], *, log: Path, within: Path, seconds: float) -> int:
        _, option, out, run, *words = argv[argv.index("evaluate") :]
        assert (option, out) == ("--out", str(log.with_suffix(""))), "each form has its own folder"
        asked.append([run, *words])
        assert (words[-1], seconds) == ("--json", 300)
        if "--fold" in words and ("points/4" in run or "--compile" in words):
            log.write_text("bigbatch: no norm to fold\n")
            return 1
        record = {"model_images_per_second": 50.0 + 50 * len(words[:-1]), "top1": 0.5}
        log.write_text(f"in words\n{json.dumps(record)}\n")
        return 0

    monkeypatch.setattr(inference, "run_command", evaluate)
    assert inference.measure(plan, points, FOLDER) is None, "nothing is trained"
    for number in (0, 1, 4):  # the first seed of plain, both of smooth
        FOLDER.change_state(number, state="done")
    found = inference.measure(plan, points, FOLDER)
    assert found is not None
    (table,) = found.tables
    assert table.title == "Inference with what smooth trained"
    assert table.rows == (
        ("plain", "2", "100", "100 to 100", "1.00", "1.00", "50.00%"),
        ("folded", "1, 1 not: no norm to fold", "150", "150 to 150", "1.50", "1.50", "50.00%"),
        ("half", "1, 1 not: no norm to fold", "150", "150 to 150", "1.00", "1.50", "50.00%"),
        ("compiled", "0, 2 not: no norm to fold", *[""] * 5),
    )
    assert found.undone
    assert asked[:2] == [["out/points/1/run", "--a=1", "--json"], ["out/points/1/run", "--a=1", "--fold", "--json"]]
    asked.clear()
    assert inference.measure(plan, points, FOLDER) == found
    assert [words for run, *words in asked if run == "out/points/1/run"] == [
        ["--a=1", "--fold", "--compile", "--json"]
    ], "what was told is not measured again"


def test_inference_pools_no_values_of_the_grid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, points = begin(tmp_path, inference={"plain": []}, grid={"model.options.width": [8, 16]}, cases={})
    for number in range(1, 4):  # both seeds of 16, one of 8
        FOLDER.change_state(number, state="done")
    monkeypatch.setattr(inference, "_evaluate", lambda *_, **__: (100.0, 0.5))
    found = inference.measure(plan, points, FOLDER)
    assert found is not None
    assert [(table.title, table.rows[0][1]) for table in found.tables] == [
        ("Inference with what model.options.width=16 trained", "2"),
        ("Inference with what model.options.width=8 trained", "1"),
    ]


def test_inference_imports_what_the_sweep_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, points = begin(tmp_path, inference={"plain": []}, options={"run.metrics": {"x": "own.Score"}}, cases={})
    FOLDER.change_state(0, state="done")
    asked: list[str] = []
    monkeypatch.setattr(inference, "_evaluate", lambda argv, *_, **__: asked.extend(argv) or "not told")
    inference.measure(plan, points, FOLDER)
    assert asked[-3:] == ["out/points/0/run", "--run.metrics={x: own.Score}", "--json"]
