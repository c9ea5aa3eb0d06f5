"""The benchmark of sums on a grid, at a tiny size."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.comm import exact_sums


@pytest.mark.long
@pytest.mark.weekly
def test_exact_sums_of_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "exact.json"
    options = ["--models", "resnet18", "--image-size", "32", "--batch", "2", "--rounds", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", ["exact_sums", *options])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    exact_sums.main()
    found = json.loads(out.read_text())["models"]["resnet18"]
    assert found["price_percent"]["n"] == 2
    errors = {kind: each["l2"] for kind, each in found["errors"].items()}
    # a rounding of fp32 is at most 2**-24 of a number, one of bf16 2**-9, and most are a third of it
    assert 0 < errors["grid"] < 2.0**-24
    assert 2.0**-11 < errors["bf16 wire"] < 2.0**-8
    assert errors["grid"] < errors["int32, room for all terms"] < errors["fp16 wire"]
    assert found["share not 0"] > 0.2, "batch norms that begin with 0 give no gradients before an update"
    assert found["share lost below the grid"] < 1e-3


def maxima(terms: list[torch.Tensor]) -> exact_sums.Maxima:
    found = exact_sums.Maxima([2])
    for term_N in terms:
        found.see(term_N)
    return found


def test_exact_sums_errors_of_terms_below_the_grid() -> None:
    terms = [torch.tensor([1.0, 2.0**-52]), torch.tensor([1.0, 2.0**-40])]
    found = exact_sums.errors(terms, num_terms=2, before=maxima(terms))
    assert (found["share not 0"], found["share lost below the grid"]) == (1.0, 0.25)
    assert found["share lost below int32's steps"] == 0.5
    norm = (4 + 2.0**-80) ** 0.5
    assert found["errors"]["grid"]["l2"] == pytest.approx(2.0**-52 / norm)
    assert found["errors"]["int32, room for all terms"]["largest"] == pytest.approx(2.0**-41)


def test_exact_sums_counts_what_int32_has_no_room_for() -> None:
    before = maxima([torch.tensor([1.0, 0.5])] * 2)
    terms = [torch.tensor([1.0, 0.5]), torch.tensor([9.0, 0.5])]
    found = exact_sums.errors(terms, num_terms=2, before=before)
    # a margin of 4, and of less than 8 by rounding the exponent down
    assert found["terms beyond int32's room"] == 1
    terms = [torch.tensor([8.5, 0.5]), torch.tensor([8.5, 0.5])]
    found = exact_sums.errors(terms, num_terms=2, before=before)
    assert found["totals beyond int32"] == 1, "their sum was 2, and is more than eight times that"
