"""Small benchmarks end with figures that agree with each other, in the form that pages take them from."""

import json
from pathlib import Path

import pytest
from own_imports import ROOT
from torch import nn

from benchmarks import checkpoint, language_model
from benchmarks.comm import meeting, rounding
from benchmarks.largebatch import reproducible_cost
from bigbatch.trainer.models import build_model


def test_wire_sums_lose_more_than_fp32_sums(tmp_path: Path) -> None:
    rounding.main(["--ranks", "8", "64", "--values", "512", "--out", str(tmp_path / "r.json")])
    rows = json.loads((tmp_path / "r.json").read_text())["rows"]
    assert len(rows) == 2 * 2 * 3 * 2
    error = {tuple(row[key] for key in ("noise", "ranks", "algorithm", "reduce_dtype")): row["error"] for row in rows}
    assert error[1.0, 64, "ring", "fp32"] < 2**-8 < error[1.0, 64, "ring", "wire"]
    assert error[1.0, 64, "ring", "wire"] > error[1.0, 8, "ring", "wire"]


def test_exactness_is_that_of_the_formula_for_peers_too(tmp_path: Path) -> None:
    for peer in ("timm", "torch_optimizer"):
        pytest.importorskip(peer)
    from benchmarks.largebatch import lars_exactness

    lars_exactness.main(["--steps", "4", "--out", str(tmp_path / "e.json")])
    found = json.loads((tmp_path / "e.json").read_text())["deviations"]
    assert all(
        found["bigbatch float64"][case] < 1e-12 < found["bigbatch fp32"][case] < 1e-3 for case in found["timm, eps 0"]
    )
    assert found["timm, eps 0"]["convolution"] < 1e-14 < found["timm as it comes"]["convolution"]


@pytest.mark.slow
def test_ranks_that_meet_agree_which_one_is_lost(tmp_path: Path) -> None:
    words = ["--ranks", "6", "--processes", "2", "--rounds", "1"]
    meeting.main([*words, "--out", str(tmp_path / "m.json")])
    assert json.loads((tmp_path / "m.json").read_text())["found"]["ranks_with_the_right_verdict"] == 5


@pytest.mark.slow
def test_cost_of_integer_sums_is_that_of_the_steps(tmp_path: Path) -> None:
    words = ["--models", "resnet18:32", "--microbatch", "2", "--rounds", "1"]
    reproducible_cost.main([*words, "--out", str(tmp_path / "r.json")])
    [row] = json.loads((tmp_path / "r.json").read_text())["rows"]
    seconds = {name: values["median"] for name, values in row["seconds"].items()}
    assert row["percent"]["median"] == pytest.approx(100 * (seconds["integers"] / seconds["fp32"] - 1), abs=0.01)


@pytest.mark.slow
def test_checkpoint_has_weights_and_momentum(tmp_path: Path) -> None:
    words = ["--model", "resnet18", "--rounds", "1", "--scratch", str(tmp_path)]
    checkpoint.main([*words, "--out", str(tmp_path / "c.json")])
    found = json.loads((tmp_path / "c.json").read_text())
    weights = sum(each.numel() for each in build_model("resnet18", num_classes=10, norm=nn.BatchNorm2d).parameters())
    assert 8 * weights < found["bytes"] < 1.01 * 8 * weights
    assert found["percent_of_interval"]["copy"]["median"] == pytest.approx(
        found["milliseconds"]["copy"]["median"] / 600, rel=1e-3
    )


@pytest.mark.slow
def test_runs_of_the_language_model_are_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    text, out = tmp_path / "text.txt", tmp_path / "r.json"
    text.write_text((ROOT / "examples/text/frankenstein.txt").read_text(encoding="ascii")[:12_000])
    for cell in ("lstm", "elman"):
        language_model.main(["--cells", cell, "--epochs", "2", "--text", str(text), "--out", str(out)])
    runs = json.loads(out.read_text())["runs"]
    assert [(run["cell"], len(run["held_out"])) for run in runs] == [("lstm", 2), ("elman", 2)]
    for run in runs:
        assert run["best"] == min(run["held_out"]) == run["held_out"][run["best_epoch"] - 1]
        assert run["last"] == run["held_out"][-1]
