"""Runs side by side: figures of each, cells over seeds, the values that distinguish them, and the plot."""

import csv
import json
import math
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigbatch.cli import main
from bigbatch.experiments.report.compare import (
    Figures,
    TrainedRun,
    best_of,
    best_run_of,
    compare_runs,
    comparison_table,
    differing_keys,
    label_runs,
    read_figures,
)
from bigbatch.experiments.report.plots import draw_comparison
from bigbatch.trainer.folder.folder import RunDir

RECORDS = [
    {"kind": "start"},
    {"kind": "train", "step": 10, "epoch": 1.0, "images_per_second": 500.0},
    {"kind": "eval", "step": 10, "epoch": 1.0, "top1": 0.3},
    {"kind": "train", "step": 15, "epoch": 1.5, "images_per_second": 250.0},
    {"kind": "eval", "step": 15, "epoch": 1.5, "top1": 0.7},
    {"kind": "train", "step": 30, "epoch": 3.0, "images_per_second": 1000.0},
    {"kind": "eval", "step": 30, "epoch": 3.0, "top1": 0.6, "loss": 1.25, "seconds": 0.25},
]


def figures(records: list[dict[str, Any]], *, target: float | None = None, is_generated: bool = False) -> Figures:
    return read_figures(records, global_batch_size=100, target=target, is_generated=is_generated)


def test_seconds_are_of_training_until_the_evaluation() -> None:
    """100 images a step: 10 steps at 500/s are 2 s, 5 at 250/s are 2 s, and 15 at 1,000/s are 1.5 s."""
    assert figures(RECORDS, target=0.5) == Figures(3.0, 5.5, 3000 / 5.5, 0.6, 1.25, 4.0, 0.25, 0)
    assert figures(RECORDS, target=0.3).reached_seconds == 2.0
    assert figures(RECORDS, target=0.8).reached_seconds is None
    assert figures(RECORDS).reached_seconds is None
    assert figures(RECORDS, is_generated=True).top1 is None, "of images that were made up"


def test_run_that_went_on_from_a_checkpoint_has_each_step_once_and_says_so() -> None:
    """10 steps at 500/s are 2 s; the run stopped after step 13, whose rate is that of step 15."""
    records = [
        {"kind": "start", "step": 0},
        {"kind": "train", "step": 10, "epoch": 1.0, "images_per_second": 500.0},
        {"kind": "start", "step": 8},
        {"kind": "train", "step": 9, "epoch": 0.9, "images_per_second": 500.0},  # was lost, and is done again
        {"kind": "train", "step": 15, "epoch": 1.5, "images_per_second": 250.0},
        {"kind": "eval", "step": 15, "epoch": 1.5, "top1": 0.7},
    ]
    found = figures(records)
    assert (found.seconds, found.resumed) == (4.0, 1)
    cell = compare_runs("t", [TrainedRun("a", {"run.seed": 0}, {}, found)])
    assert dict(zip(comparison_table(cell).head, comparison_table(cell).rows[0], strict=True))["n"] == "1, 1 resumed"


def test_seeds_of_two_modes_are_separate_cells_and_a_note_says_why() -> None:
    def compared(**facts: list[Any]) -> Any:
        configs = [dict(zip(facts, each, strict=True)) for each in zip(*facts.values(), strict=True)]
        found = figures(RECORDS)
        runs = [TrainedRun(f"{k}", {"run.seed": k, **each}, {"lr": 1}, found) for k, each in enumerate(configs)]
        return compare_runs("t", runs)

    fallen_back = compared(mode=["compiled", "eager"])
    assert [cell.values for cell in fallen_back.cells] == [{"mode": "compiled"}, {"mode": "eager"}]
    assert fallen_back.notes == ("t: runs with equal values differ in mode, so they are separate cells.",)
    stated = compared(**{"mode": ["compiled", "eager"], "compute.compile": ["default", None]})
    assert [[*cell.values] for cell in stated.cells] == 2 * [["compute.compile"]]
    assert len(compared(mode=["eager", "eager"]).cells) == 1


def test_run_that_healed_was_not_resumed_and_counts_its_losses_and_joins() -> None:
    starts = [("rank_loss", 0.5), ("rank_loss", 0.75), ("rank_join", 2.0), ("other", 9.0)]
    records = [RECORDS[0], {"kind": "start", "interruption": "other", "interruption_seconds": 1.0}]
    records += [{"kind": "start", "interruption": kind, "interruption_seconds": waited} for kind, waited in starts]
    found = figures([*records, *RECORDS[1:]])
    assert (found.num_rank_losses, found.rank_loss_seconds, found.num_rank_joins) == (2, 1.25, 1)
    assert (found.resumed, found.rank_join_seconds) == (0, 2.0)
    table = comparison_table(compare_runs("t", [TrainedRun("a", {"run.seed": 0}, {}, found)]))
    assert dict(zip(table.head, table.rows[0], strict=True))["n"] == "1, 2 rank losses (1.2 s), 1 rank join (2.0 s)"


@pytest.mark.parametrize(
    ("train", "evaluation"),
    [
        ({"images_per_second": 0}, {}),
        ({"images_per_second": math.nan}, {}),
        ({"images_per_second": "fast"}, {}),
        ({"step": 10**400, "images_per_second": 1.5}, {}),
        ({"step": 1e308, "images_per_second": 1e-308}, {}),
        ({"kind": "hint"}, {}),
        ({}, {"top1": "good"}),
        ({}, {"top1": math.nan}),
        ({}, {"epoch": None}),
        ({}, {"seconds": "long"}),
    ],
    ids=str,
)
def test_records_that_are_none_have_no_figures(train: dict[str, Any], evaluation: dict[str, Any]) -> None:
    lines = [
        {"kind": "train", "step": 144, "epoch": 12.0, "images_per_second": 1024.0} | train,
        {"kind": "eval", "epoch": 12.0, "top1": 0.6} | evaluation,
    ]
    with pytest.raises((ValueError, TypeError, KeyError, ArithmeticError)):
        figures(lines)


def run(case: str, batch: int, seed: int, top1: float | None, *, seconds: float = 10.0) -> TrainedRun:
    config = {"run.seed": seed, "run.directory": f"{case}{batch}{seed}", "batch.global_batch_size": batch, "a.lr": 0.1}
    config |= {"optimizer.name": case}
    values = {"case": case, "batch.global_batch_size": batch, "a.lr": 0.1}
    loss = None if top1 is None else 1 - top1
    reached = None if top1 is None or top1 < 0.9 else seconds / 2
    return TrainedRun(f"{case}/{batch}/{seed}", config, values, Figures(3, seconds, 100, top1, loss, reached, 1.0, 0))


RUNS = [
    *(run("sgd", batch, seed, 0.5 + 0.1 * seed, seconds=10 + 10 * seed) for batch in (64, 128) for seed in (0, 1)),
    *(run("lars", batch, seed, 0.9 + 0.01 * seed) for batch in (64, 128) for seed in (0, 1, 2)),
]


def test_cells_without_accuracy_are_sorted_by_speed() -> None:
    slow, fast = (run(case, 64, 0, None) for case in ("slow", "fast"))
    fast = replace(fast, figures=replace(fast.figures, images_per_second=200))
    assert [cell.values["case"] for cell in compare_runs("t", [slow, fast]).cells] == ["fast", "slow"]


def test_cells_are_over_seeds_and_sorted_by_accuracy() -> None:
    found = compare_runs("t", RUNS)
    assert found.keys == ("case", "batch.global_batch_size"), "what is the same in all is not a label"
    first, last = found.cells[0], found.cells[-1]
    assert (first.values["case"], len(first.runs), last.values["case"], len(last.runs)) == ("lars", 3, "sgd", 2)
    assert first.mean("top1") == pytest.approx(0.91)
    assert first.deviation("top1") == pytest.approx(0.01)
    assert last.deviation("top1") == pytest.approx(0.1 / 2**0.5)
    table = comparison_table(found)
    rows = [dict(zip(table.head, row, strict=True)) for row in table.rows]
    assert rows[0]["top-1 (%)"] == "91.00 ± 1.00"
    assert rows[0]["loss"] == "0.0900 ± 0.0100"
    assert rows[-1]["training (s)"] == "15.0 (10.0 to 20.0)"
    assert best_of(found).endswith("within two standard errors)."), "both batches of lars are alike"


def test_one_seed_has_no_deviation_and_says_little() -> None:
    found = compare_runs("t", [run("sgd", 64, 0, 0.5), run("lars", 64, 0, 0.6)])
    assert found.keys == ("case",)
    assert [row[2] for row in comparison_table(found).rows] == ["60.00", "50.00"]
    assert best_of(found) == "", "the best run is the best cell"
    best = "t: best run is lars/64/0 (lars, seed 0), top-1 60.00%; one seed says little about a difference."
    assert best_run_of(found) == best


def test_no_run_is_called_best_among_runs_on_other_data() -> None:
    def compared(*facts: tuple[str, int, int | None]) -> Any:
        keys = ("data.root", "data.num_classes", "train_samples")
        runs = [run("sgd", 64, index % 2, 0.5 + 0.1 * index) for index in range(len(facts))]
        runs = [
            replace(each, config=each.config | dict(zip(keys, fact, strict=True)))
            for each, fact in zip(runs, facts, strict=True)
        ]
        found = compare_runs("t", runs)
        return best_of(found), best_run_of(found)

    shapes, flowers = ("data/shapes", 10, 1000), ("data/flowers", 3, 240)
    differ = "t: different data (data.root, data.num_classes, train_samples differ): accuracies cannot be compared."
    assert compared(shapes, flowers) == (differ, "")
    assert compared(shapes, shapes, flowers, flowers) == (differ, ""), "nor a cell of several seeds"
    assert compared(shapes, ("data/shapes", 3, 1000))[1] == "", "a folder that was changed"
    assert "best run is" in compared(shapes, ("data/packed", 10, 1000))[1], "the same images, packed"
    assert "best run is" in compared(shapes, ("data/shapes", 10, 100))[1], "the validation images are the same"


def test_cumulative_cells_keep_their_order_and_tell_gains() -> None:
    costs = {"a": 20.0, "b": 10.0, "c": 40.0}
    runs = [run(name, 64, 0, top1, seconds=costs[name]) for name, top1 in (("a", 0.5), ("b", 0.92), ("c", 0.9))]
    found = compare_runs("t", runs, is_cumulative=True, target=0.9)
    table = comparison_table(found)
    rows = [dict(zip(table.head, row, strict=True)) for row in table.rows]
    assert [row["case"] for row in rows] == ["a", "b", "c"]
    speedups = [(row["times as fast as the one before"], row["as the first"]) for row in rows]
    assert speedups == [("1.00", "1.00"), ("2.00", "2.00"), ("0.25", "0.50")]
    assert [row["to 90.0% (s)"] for row in rows] == ["not reached", "5.0", "20.0"]
    assert best_of(found) == ""


def test_cells_hold_runs_that_differ_in_their_seeds_alone() -> None:
    """By batch, sgd with seeds 0 and 1 and lars with 0, 1 and 2 are two cells, and the optimizer is a column."""
    assert differing_keys(RUNS) == ["batch.global_batch_size", "optimizer.name"], "neither seeds nor folders"
    by_batch = compare_runs("t", label_runs(RUNS, ["batch.global_batch_size"]))
    assert by_batch.keys == ("batch.global_batch_size", "optimizer.name")
    assert sorted(len(cell.runs) for cell in by_batch.cells) == [2, 2, 3, 3]
    assert by_batch.notes == ("t: runs with equal values differ in optimizer.name, so they are separate cells.",)
    by_both = compare_runs("t", label_runs(RUNS, ["batch.global_batch_size", "optimizer.name"]))
    assert ([len(cell.runs) for cell in by_both.cells], by_both.notes) == ([3, 3, 2, 2], ())


def test_cells_of_runs_without_labels_have_what_differs_as_columns() -> None:
    found = compare_runs("t", label_runs(RUNS, ()))
    assert (found.keys, found.notes) == (("batch.global_batch_size", "optimizer.name"), ())
    assert [len(cell.runs) for cell in found.cells] == [3, 3, 2, 2]


def other(changes: dict[str, Any], *, seed: int = 1) -> TrainedRun:
    first = run("lars", 64, seed, 0.9)
    return replace(first, name="other", config={**first.config, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"batch.global_batch_size": 128},
        {"schedule.base_lr": 2.0},
        {"optimizer.weight_decay": 1e-4},
        {"data.root": "elsewhere"},
        {"model.options.width": 8},
        {"optimizer.lr_factors": {"fc.*": 2}},
        {"ranks": 8},
        {"device": "NVIDIA H200"},
        {"torch": "2.14.1"},
        {"commit": "abc"},
        {"state": "unfinished"},
        {"train_samples": 10},
        {"batch.global_batch_size": "64"},
    ],
    ids=str,
)
def test_cells_hold_no_run_of_other_settings_data_or_conditions(changes: dict[str, Any]) -> None:
    first = run("lars", 64, 0, 0.9)
    alike = compare_runs("t", label_runs([first, other({})], ["optimizer.name"]))
    assert ([len(cell.runs) for cell in alike.cells], alike.notes) == ([2], ())
    found = compare_runs("t", label_runs([first, other(changes)], ["optimizer.name"]))
    assert found.keys == tuple(changes)
    assert [len(cell.runs) for cell in found.cells] == [1, 1]
    assert f"differ in {next(iter(changes))}," in found.notes[0]
    assert all(cell.deviation("top1") is None for cell in found.cells)


@pytest.mark.parametrize("key", ["run.directory", "run.loggers", "run.log_every_steps", "comm.timeout_seconds"])
def test_cells_do_not_go_by_what_a_run_writes_and_waits_for(key: str) -> None:
    found = compare_runs("t", label_runs([run("lars", 64, 0, 0.9), other({key: "b"})], ["optimizer.name"]))
    assert [len(cell.runs) for cell in found.cells] == [2]


def test_run_of_the_same_seed_again_is_not_counted_and_named() -> None:
    first, again = run("lars", 64, 1, 0.8), other({"run.directory": "b"})
    found = compare_runs("t", label_runs([first, run("lars", 64, 0, 0.9), again], ["optimizer.name"]))
    (cell,) = found.cells
    assert [each.name for each in cell.runs] == ["lars/64/0", "lars/64/1"]
    assert cell.mean("top1") == pytest.approx(0.85)
    assert found.notes == ("t: not counted, because they repeat settings and seed of another run: other.",)


def test_cells_that_differ_in_too_many_keys_are_labelled_by_their_folders_and_still_have_their_seeds() -> None:
    many = {f"a.key{number}": number for number in range(7)}
    runs = [run("lars", 64, 0, 0.9), other({}), other(many, seed=0), other(many)]
    found = compare_runs("t", label_runs(runs, ()))
    assert [(cell.values, len(cell.runs)) for cell in found.cells] == [({"run": "lars/64/0"}, 2), ({"run": "other"}, 2)]
    assert compare_runs("t", label_runs([], ["optimizer.name"])).cells == ()


def test_columns_of_keys_with_one_short_name_have_their_whole_names() -> None:
    keys = ("run.epochs", "optimizer.loss", "a.eps", "b.eps", "schedule.base_lr")
    runs = [other({}), other(dict.fromkeys(keys, 1))]
    head = comparison_table(compare_runs("t", label_runs(runs, ()))).head
    assert head[:5] == ("run.epochs", "optimizer.loss", "a.eps", "b.eps", "base_lr")


def test_plot_has_a_line_and_a_band_for_each_case_over_the_batch() -> None:
    (axes,) = draw_comparison(compare_runs("t", RUNS)).axes
    assert {line.get_label(): list(line.get_xdata()) for line in axes.get_lines()} == {
        "lars": [64, 128],
        "sgd": [64, 128],
    }
    assert len(axes.collections) == 2
    assert axes.get_xlabel() == "global batch size"


def test_plot_of_cases_without_an_order_connects_none() -> None:
    figure = draw_comparison(compare_runs("t", [each for each in RUNS if each.values["batch.global_batch_size"] == 64]))
    right = figure.axes[1]
    runs = [line for line in right.get_lines() if line.get_marker() == "o"]
    assert [line.get_linestyle() for line in runs] == ["None", "None"]


def test_plots_of_many_cells_can_be_read() -> None:
    cases = compare_runs("t", [run(f"case {number}", 64, 0, number / 2000) for number in range(2000)])
    figure = draw_comparison(cases)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()][:2] == ["case 1999", "case 1998"]
    assert figure.axes[0].get_title() == "t: the first 50 of 2000"
    lines = compare_runs("t", [run(f"case {number}", 64 + number, 0, number / 300) for number in range(300)])
    (axes,) = draw_comparison(lines).axes
    assert len(axes.get_lines()) == 300
    assert [text.get_text() for text in axes.get_legend().get_texts()][-2:] == ["case 115", "others"]
    assert len(axes.get_xticks()) < 20


def test_plot_names_a_case_that_begins_with_an_underscore_or_is_long() -> None:
    """matplotlib leaves such a label out of the legend."""
    (axes,) = draw_comparison(compare_runs("t", [run("_base", 64, 0, 0.5), run("_base", 128, 0, 0.6)])).axes
    assert not axes.get_legend()
    runs = [run(case, batch, 0, 0.5) for case in ("_base", "x" * 300) for batch in (64, 128)]
    (axes,) = draw_comparison(compare_runs("t", runs)).axes
    named = [text.get_text().strip() for text in axes.get_legend().get_texts()]
    assert named == ["_base", f"{'x' * 30} ... {'x' * 30}"], "a long name would leave no room"


def test_plot_of_characters_that_the_font_lacks_is_written_without_a_warning(tmp_path: Path) -> None:
    figure = draw_comparison(compare_runs("t", [run("\u65e5", 64, 0, 0.5), run("b", 64, 0, 0.5)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RunDir(tmp_path).save_plot(tmp_path / "a.png", figure)


def write_run(
    folder: Path, *, name: str, seed: int, top1: float, target: float | None = None, **others: dict[str, Any]
) -> Path:
    folder.mkdir(parents=True)
    config = {"run": {"seed": seed, "target_top1": target}, "optimizer": {"name": name}, "data": {"loader": "dali"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"batch": {"global_batch_size": 100}} | others))
    lines = [*RECORDS[:-1], RECORDS[-1] | {"top1": top1, "top5": 1.0}]
    start = {"kind": "start", "job": {"world_size": 1, "device": "cpu"}}
    lines = [{"time": 100.0 + i, "elapsed_seconds": float(i), **each} for i, each in enumerate([start, *lines[1:]])]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def cells_in(folder: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((folder / "cells.csv").read_text().splitlines()))


def test_report_groups_any_runs_by_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for index, (name, seed) in enumerate([("lars", 0), ("lars", 1), ("sgd", 0)]):
        write_run(tmp_path / f"run{index}", name=name, seed=seed, top1=0.5 + 0.1 * index)
    folders = [str(tmp_path / f"run{index}") for index in range(3)]
    assert main(["report", "--by", "optimizer.name", *folders, "--output", str(tmp_path / "out")]) == 0
    written = capsys.readouterr().out.rpartition(f"written into {tmp_path / 'out'}: ")[2].strip().split(", ")
    assert {"report.html", "report.md", "report.json", "runs.csv", "cells.csv", "comparison.png"} <= set(written)
    assert all((tmp_path / "out" / name).stat().st_size for name in written), "files that are named exist"
    assert [(cell["optimizer.name"], cell["n"], cell["top1_mean"]) for cell in cells_in(tmp_path / "out")] == [
        ("sgd", "1", "0.7"),
        ("lars", "2", "0.55"),
    ]
    runs = list(csv.DictReader((tmp_path / "out/runs.csv").read_text().splitlines()))
    assert [(each["optimizer.name"], each["seed"]) for each in runs] == [("lars", "0"), ("lars", "1"), ("sgd", "0")]
    assert main(["report", "--by", "optimizer.nam", *folders]) == 1
    assert "optimizer.name" in capsys.readouterr().err


def test_report_separates_runs_by_all_that_matters_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Folders of an older release lack keys, which have their defaults, as an unstated key has."""
    monkeypatch.chdir(tmp_path)
    write_run(Path("a"), name="lars", seed=0, top1=0.5)
    write_run(Path("b"), name="lars", seed=1, top1=0.6, schedule={"name": "polynomial", "base_lr": 1.0})
    write_run(Path("c"), name="lars", seed=1, top1=0.7, schedule={"base_lr": 2.0})
    shutil.copytree("a", "copied")
    assert main(["report", "--by", "optimizer.name", "a", "b", "c", "copied", "b/../b"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "runs with equal values differ in schedule.base_lr," in out
    assert "repeat settings and seed of another run: copied." in out
    cells = [(cell["schedule.base_lr"], cell["n"], cell["seeds"]) for cell in cells_in(Path("report"))]
    assert cells == [("2.0", "1", "[1]"), ("1.0", "2", "[0, 1]")]
    assert sorted(path.name for path in Path("a").iterdir()) == ["config.yaml", "metrics.jsonl"], "beside, not into it"


@pytest.mark.parametrize(
    ("targets", "options", "expected"),
    [
        ((None, None), (), 0.71),  # what both reach
        ((0.4, 0.5), (), 0.4),
        ((None, 0.5), (), 0.5),
        ((0.4, 0.5), ("--target", "0.6"), 0.6),
    ],
)
def test_report_gives_all_folders_the_same_target(
    targets: tuple[float | None, ...], options: tuple[str, ...], expected: float, tmp_path: Path
) -> None:
    runs = [
        write_run(tmp_path / f"run{index}", name="lars", seed=index, top1=0.71 + 0.1 * index, target=target)
        for index, target in enumerate(targets)
    ]
    assert main(["report", *map(str, runs), *options]) == 0
    facts = json.loads((tmp_path / "report/report.json").read_text())
    assert [each["target"] for each in facts["runs"].values()] == [expected] * 2
    assert f"to {100 * expected:.1f}% (s)" in (tmp_path / "report/report.md").read_text()


def test_report_counts_a_run_of_a_sweep_once_and_writes_where_the_folder_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sweep = tmp_path / "sweeps/a"
    for number in range(2):
        run_folder = write_run(sweep / f"points/{number}/run", name="lars", seed=number, top1=0.5)
        (run_folder / "summary.json").write_text(json.dumps({"global_batch_size": 100, "num_nodes": 1}))
        state = {"number": number, "values": {"a.lr": 1}, "ranks": 1, "ranks_per_node": 1, "state": "done"}
        (sweep / f"points/{number}/point.json").write_text(json.dumps({**state, "reason": None}))
    (sweep / "sweep.yaml").write_text("name: a\n")
    monkeypatch.chdir(sweep)
    for folders in ([".", "points/0/run"], ["points/1/run", "."]):
        assert main(["report", *folders, "--by", "optimizer.name"]) == 0
        ((cell,),) = [cells_in(tmp_path / "sweeps/report")]
        assert cell["n"] == "2"
        shutil.rmtree(tmp_path / "sweeps/report")
    assert main(["report", "."]) == 0
    assert (sweep / "report/cells.csv").is_file()
