"""The results of the ablations: figures follow closed forms, the table and the plot state their conditions."""

import json
import sys

import pytest
from fake_ablations import TINY, FakeBigbatch
from PIL import Image

from benchmarks.largebatch import ablation_results, ablations, plot_ablations
from benchmarks.largebatch.ablation_cases import ABLATED


def run(top1):
    return {"top1": top1}


def test_summary_by_hand():
    found = ablation_results.summarise([run(0.5), run(None), run(0.6), run(0.7)])
    assert found["diverged"] == 1
    assert found["top1_percent"] == pytest.approx({"n": 3, "mean": 60.0, "sd": 10.0, "min": 50.0, "max": 70.0})
    assert ablation_results.summarise([run(None)])["top1_percent"]["mean"] is None
    assert ablation_results.summarise([run(0.5)])["top1_percent"]["sd"] is None


def test_differences_by_hand():
    def case(optimizer, mean, sd, n):
        return {
            "family": "batch",
            "optimizer": optimizer,
            "batch": 64,
            "top1_percent": {"mean": mean, "sd": sd, "n": n},
            "diverged": 9 - n,
        }

    found = {"a": case("lars", 60.0, 3.0, 9), "b": case("sgd", 62.0, 4.0, 4), "c": case("nesterov", None, None, 0)}
    (name, points, error), none = ablation_results.differences(found)
    assert name == "batch 64: lars (9 of 9 ended) minus sgd (4 of 9 ended)"
    assert (points, error) == (-2.0, pytest.approx(5**0.5))  # 9 / 9 + 16 / 4
    assert none == ("batch 64: lars (9 of 9 ended) minus nesterov (0 of 9 ended)", None, None)


def record_by_hand():
    def case(family, optimizer, *top1s):
        runs = [{"base_lr": 0.5, "top1": top1, "loss_curve": {"epoch": [1], "loss": [2.0]}} for top1 in top1s]
        facts = {"family": family, "optimizer": optimizer, "batch": 64, "epochs": 1 if family == "precision" else 5}
        return {**facts, **ablation_results.summarise(runs), "runs": runs}

    space = "schedule.base_lr=log:1.0:100.0"
    studies = {
        "lars-64": {"space": space, "base_lr": 90.0, "is_edge": True},
        "sgd-64": {"space": space, "base_lr": 9.0, "is_edge": False},
    }
    found = {
        "lars 64": case("batch", "lars", 0.5, None, 0.6),
        "sgd 64": case("batch", "sgd", 0.5, 0.6, 0.7),
        "nesterov 64": case("batch", "nesterov", None, None),
        "half": case("precision", "lars", 0.5, None),
    }
    tuning = {"trials": 5, "epochs": 2, "studies": studies}
    return {"conditions": {"options": {"dataset": "cifar10"}}, "tuning": tuning, "cases": found}


def test_table_states_its_conditions():
    table = ablation_results.markdown(record_by_hand(), title="x")
    assert "| lars 64 | 64 | 5 | 0.5 | 55.00 | 7.07 | 50.00 | 60.00 | 2 of 3 ended |" in table
    assert "the best of 5 trials of 2 epochs:" in table
    assert "- lars-64: 90 of schedule.base_lr=log:1.0:100.0, at an end of the range" in table
    assert "- sgd-64: 9 of schedule.base_lr=log:1.0:100.0, inside the range" in table
    assert "chosen on the validation pictures that accuracy is reported on, for all alike" in table
    assert "take the rate of LARS in fp32, and have 1 epochs" in table
    assert "decay on all take the rate of the same optimizer without it" in table


def test_plot_marks_cases_that_are_incomplete():
    batches, others, _ = plot_ablations.draw([record_by_hand()]).axes
    assert [text.get_text() for text in batches.texts] == ["2 of 3 ended", "nesterov: 0 of 2 ended"]
    assert others.get_yticklabels()[0].get_text() == "half\n(batch 64, 1 of 2 ended)"


@pytest.mark.long
def test_plot_draws_every_case(tmp_path, monkeypatch):
    monkeypatch.setattr(ablations, "run_child", FakeBigbatch())
    ablations.run_all(TINY, tmp_path)
    record = {"conditions": {"options": {"dataset": "cifar10"}}, **ablation_results.collect(TINY, tmp_path)}
    (tmp_path / "record.json").write_text(json.dumps(record))
    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path / "record.json"), "--out", str(tmp_path / "new/plot.png")])
    plot_ablations.main()
    assert Image.open(tmp_path / "new/plot.png").size[0] > 1000
    axes = plot_ablations.draw([record]).axes
    assert [line.get_label() for line in axes[0].get_lines()] == list(ABLATED)
    assert len(axes[1].get_yticklabels()) == 5
    assert not axes[0].texts
