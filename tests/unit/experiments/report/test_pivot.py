"""The table of a paper: entries pool seeds and nothing else; as text, CSV and LaTeX. Beside it the learning curves."""

import csv
from dataclasses import replace
from typing import Any

import pytest

from bigbatch.cli import main
from bigbatch.experiments.report.compare import Curves, Figures, TrainedRun, best_run_of, compare_runs
from bigbatch.experiments.report.pivot import as_latex, make_pivot
from bigbatch.experiments.report.plots import draw_curves
from bigbatch.launch.tables import as_csv

KEYS = ("optimizer.name", "batch.global_batch_size")


def run(name: str, batch: int, seed: int, top1: float | None, **others: Any) -> TrainedRun:
    config = {"run.seed": seed, "optimizer.name": name, "batch.global_batch_size": batch, "schedule.base_lr": 0.1}
    folder = f"{name}/{batch}/{seed}/{len(others)}"
    return TrainedRun(folder, config | others, {"case": name}, Figures(3, 10.0, 100.0, top1, 1.0, None, 1.0, 0))


def test_pivot_has_mean_and_sample_deviation_over_seeds_by_hand() -> None:
    """0.5 and 0.6: mean 0.55, deviation 0.1 / sqrt(2) = 0.0707."""
    runs = [run("sgd", 512, 0, 0.5), run("sgd", 512, 1, 0.6), run("sgd", 64, 0, 0.7), run("my_opt", 512, 0, 0.4)]
    pivot = make_pivot(runs, KEYS)
    table = pivot.table()
    assert table.head == ("optimizer", "global batch size 64", "global batch size 512")
    assert table.rows == (("sgd", "70.00 (n = 1)", "55.00 ± 7.07 (n = 2)"), ("my_opt", "", "40.00 (n = 1)"))
    first = next(pivot.records())
    assert (first["n"], first["top1_mean"], first["not_pooled"]) == (2, 0.55, "")
    assert first["top1_deviation"] == pytest.approx(0.005**0.5)
    latex = pivot.latex().splitlines()
    assert latex[1] == r"\begin{tabular}{lrr}"
    assert latex[5] == r"sgd & 70.00 (n = 1) & 55.00 $\pm$ 7.07 (n = 2) \\"
    assert latex[6] == r"my\_opt &  & 40.00 (n = 1) \\"
    assert list(pivot.notes) == []


def test_pivot_does_not_pool_runs_that_differ_in_more_than_their_seeds() -> None:
    runs = [run("sgd", 64, 0, 0.5), run("sgd", 64, 1, 0.9, **{"schedule.base_lr": 0.2}), run("lars", 64, 0, 0.7)]
    pivot = make_pivot(runs, KEYS)
    assert pivot.table().rows == (("sgd", "not pooled (base_lr)"), ("lars", "70.00 (n = 1)"))
    records = list(pivot.records())
    assert [record["top1_mean"] for record in records] == [None, 0.7]
    assert records[0]["not_pooled"] == "schedule.base_lr"
    (note,) = pivot.notes
    assert "optimizer sgd, global batch size 64: not pooled" in note
    assert "schedule.base_lr" in note


def test_pivot_counts_a_seed_once_and_says_so() -> None:
    first = run("sgd", 64, 0, 0.5)
    pivot = make_pivot([first, replace(first, name="again")], KEYS)
    assert pivot.table().rows == (("sgd", "50.00 (n = 1)"),)
    assert "1 run not counted" in next(pivot.notes)


def test_pivot_of_speed_has_images_per_second() -> None:
    pivot = make_pivot([run("sgd", 64, seed, None) for seed in (0, 1)], KEYS)
    assert pivot.table().rows == (("sgd", "100.00 ± 0.00 (n = 2)"),)
    assert pivot.title.startswith("images/s by")


def test_latex_of_a_name_is_no_command() -> None:
    assert as_latex("a_b\\input{x}%\n$1 & #2 ~^") == (
        r"a\_b\textbackslash{}input\{x\}\% \$1 \& \#2 \textasciitilde{}\textasciicircum{}"
    )


@pytest.mark.parametrize(
    ("stated", "named"),
    [("optimizer.name", "two keys"), ("case,case", "two keys"), ("case,", "empty key"), ("case,a.lr", "--pivot")],
)
def test_pivot_of_other_keys_is_refused(stated: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--pivot", stated, "runs/none"]) == 1
    assert named in capsys.readouterr().err


def test_best_run_is_named() -> None:
    found = compare_runs("Comparison", [run("sgd", 64, 0, 0.5), run("sgd", 64, 1, 0.6), run("lars", 64, 0, 0.55)])
    assert best_run_of(found) == "Comparison: best run is sgd/64/1/0 (sgd, seed 1), top-1 60.00%."
    assert best_run_of(compare_runs("Comparison", [run("sgd", 64, 0, 0.5)])) == ""


def test_curves_are_means_of_the_epochs_that_all_seeds_have() -> None:
    seeds = [Curves({0.5: 2.0, 1.0: 1.0, 1.5: 0.5}, {1.0: 0.5}), Curves({0.5: 4.0, 1.0: 3.0}, {1.0: 0.7})]
    loss, top1 = draw_curves([("sgd", seeds), ("lars", seeds[:1])]).axes
    mean, alone = loss.lines
    assert (list(mean.get_xdata()), list(mean.get_ydata())) == ([0.5, 1.0], [3.0, 2.0])
    assert list(alone.get_xdata()) == [0.5, 1.0, 1.5]
    assert list(top1.lines[0].get_ydata()) == pytest.approx([60.0])
    assert len(loss.collections) == 1, "one band"


def test_texts_of_a_csv_file_are_no_formulas_of_a_spreadsheet() -> None:
    """Numbers stay as they are; each text that could be a formula has a ' before it."""
    text = as_csv([["path", "n"], ["=cmd|' /C calc'!A0", -1.5], ["@SUM(1)", 2], ["-x", "+1+A1"], ["a=b", "\x1b[0m"]])
    assert list(csv.reader(text.splitlines())) == [
        ["path", "n"],
        ["'=cmd|' /C calc'!A0", "-1.5"],
        ["'@SUM(1)", "2"],
        ["'-x", "'+1+A1"],
        ["a=b", "\\x1b[0m"],
    ]
    numbers = ["-1", "+1", "-0.5 %", "+.5e-3%"]
    assert as_csv([numbers]) == ",".join(numbers) + "\n"
    assert as_csv([["-1 %+A1", "-0x1", "-"]]) == "'-1 %+A1,'-0x1,'-\n"
