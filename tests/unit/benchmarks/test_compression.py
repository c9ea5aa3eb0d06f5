"""Prototypes of compressed sums against closed forms, and their benchmarks at a tiny size."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks.comm import compression, compression_pilot, compressors
from benchmarks.comm.compressors import CODES, Direct, Gathered, HopByHop, PowerSgd
from bigbatch.trainer.models import build_model


def shares(num_nodes: int, num_values: int = 1000) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [[torch.randn(num_values, generator=generator)] for _ in range(num_nodes)]


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("float32", 0.0),
        ("bfloat16", 2.0**-9),
        ("int8", 1 / 128),
        ("int8 scaled", 1 / 254),
        ("int8 stochastic", 1 / 127),
        ("e4m3", 2.0**-4),
        ("e5m2", 2.0**-3),
    ],
)
def test_a_code_is_off_by_its_share_of_the_largest_value_at_most(name: str, bound: float) -> None:
    ((values_N,),) = shares(1)
    largest = float(values_N.abs().max())
    assert float((CODES[name][0](values_N) - values_N).abs().max()) <= bound * largest * 1.001


@pytest.mark.parametrize(
    "way", [Direct(CODES["float32"][0]), HopByHop(CODES["float32"][0]), Gathered(CODES["float32"][0])]
)
def test_ways_without_a_code_give_the_sum(way: compression.Sum) -> None:
    terms = shares(5)
    exact_N = torch.stack([term_N.double() for (term_N,) in terms]).sum(0)
    torch.testing.assert_close(way(terms)[0].double(), exact_N, rtol=0, atol=1e-5)


def test_feedback_brings_in_later_what_was_lost() -> None:
    """Sums of T alike steps are off by one step's rounding, and not by T of them."""
    terms, steps = shares(3), 20
    with_feedback, without = Direct(CODES["e4m3"][0], feedback=True), Direct(CODES["e4m3"][0])
    exact_N = steps * torch.stack([term_N.double() for (term_N,) in terms]).sum(0)

    def lost(way: Direct) -> float:
        total_N = sum(way(terms)[0].double() for _ in range(steps))
        return float((total_N - exact_N).norm())

    assert lost(with_feedback) < lost(without) / 5


def test_power_sgd_is_exact_for_a_matrix_of_its_rank_and_keeps_the_rest() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix_NM = torch.randn(40, 2, generator=generator) @ torch.randn(2, 30, generator=generator)
    vector_N = torch.arange(7.0)
    terms = [[torch.cat([vector_N, matrix_NM.flatten()]) / 2] for _ in range(2)]
    (sum_N,) = PowerSgd([[(7,), (40, 30)]], 2)(terms)
    torch.testing.assert_close(sum_N, torch.cat([vector_N, matrix_NM.flatten()]), rtol=1e-4, atol=1e-4)
    way = PowerSgd([[(7,), (40, 30)]], 1)
    (first_N,) = way(terms)
    kept_NM = way.kept[0, 1]
    torch.testing.assert_close(first_N[7:].view(40, 30) + kept_NM, matrix_NM, rtol=1e-4, atol=1e-4)


def test_power_sgd_counts_the_bytes_of_both_factors_and_of_what_is_not_factored() -> None:
    assert compressors.power_sgd_bytes([(7,), (40, 10, 3), (2, 2)], 4) == 4 * (7 + 4 * (40 + 30) + 4)


@pytest.mark.long
def test_compression_of_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "compression.json"
    options = ["--models", "resnet9", "--image-size", "16", "--batch", "2", "--nodes", "2", "--steps", "2"]
    monkeypatch.setattr("sys.argv", ["compression", *options, "--out", str(out)])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(compression, "TIMED", ("int8",))
    monkeypatch.setattr(compression, "build_model", partial(build_model, width=4))
    compression.main()
    record = json.loads(out.read_text())
    found = record["models"]["resnet9"]["ways"]
    assert found["int8"]["bytes"] == pytest.approx(33 / 128, rel=1e-5)
    assert 0 < found["float32"]["error"] < 1e-6 < found["bfloat16"]["error"] < found["int8"]["error"] < 0.05
    assert list(record["nanoseconds_per_value"]) == ["int8"]


def test_pictures_of_a_folder_are_read_with_their_classes(tmp_path: Path) -> None:
    from PIL import Image

    for label, level in enumerate((0, 255)):
        (tmp_path / f"class{label}").mkdir()
        Image.new("RGB", (20, 10), (level,) * 3).save(tmp_path / f"class{label}" / "a.png")
    options = compression.parse(
        ["--data", str(tmp_path), "--image-size", "4", "--batch", "1", "--nodes", "2", "--steps", "1"]
    )
    images_BCHW, labels_B = compression.draw_pictures(options)
    assert images_BCHW.shape == (2, 3, 4, 4)
    assert (images_BCHW.mean(dim=(1, 2, 3)) > 0).tolist() == [label == 1 for label in labels_B.tolist()]


@pytest.mark.long
def test_compression_pilot_of_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "pilot.json"
    words = ["--data.loader=synthetic", "--data.num_synthetic_samples=256", "--data.image_size=16", "--model.width=4"]
    words += ["--batch.global_batch_size=128", "--batch.microbatch_size=32", "--batch.bn_span=32", "--run.epochs=1"]
    options = ["--config", "quickstart", "--seeds", "1", "--ways", "float32/int8, feedback/PowerSGD 1"]
    monkeypatch.setattr("sys.argv", ["pilot", *options, "--out", str(out), "--", *words, "--schedule.warmup_epochs=0"])
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    monkeypatch.setattr(compression_pilot.build_parts, "GradientReducer", compression_pilot.build_parts.GradientReducer)
    compression_pilot.main()
    found = json.loads(out.read_text())["ways"]
    assert list(found) == ["float32", "int8, feedback", "PowerSGD 1"]
    assert all(0 <= each["top1"]["median"] <= 1 for each in found.values())
