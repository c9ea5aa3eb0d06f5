"""The benchmark of sums on a grid, at a tiny size."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.comm import exact_sums


@pytest.mark.long
def test_exact_sums_of_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "exact.json"
    options = ["--models", "resnet18", "--image-size", "32", "--batch", "2", "--rounds", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["exact_sums", *options])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    exact_sums.main()
    found = json.loads(out.read_text())["models"]["resnet18"]
    assert found["price_percent"]["n"] == 2
    # a rounding of fp32 is at most 2**-24 of a number, one of bf16 2**-9, and most are a third of it
    assert 0 < found["errors"]["grid"] < 2.0**-24
    assert 2.0**-11 < found["errors"]["bf16 wire"] < 2.0**-8
    assert found["errors"]["share lost below the grid"] < 1e-3


def test_exact_sums_errors_of_terms_below_the_grid() -> None:
    terms = [torch.tensor([1.0, 2.0**-52]), torch.tensor([1.0, 2.0**-40])]
    found = exact_sums.errors(terms)
    assert found["share lost below the grid"] == 0.25
    assert found["grid"] == pytest.approx(2.0**-52 / (4 + 2.0**-80) ** 0.5)
