"""benchmarks.gpu.precision: its arithmetic by hand, and all of it at a tiny size."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benchmark_process import run_benchmark

from benchmarks.gpu import precision
from bigbatch.trainer.datasets.generated import write_dataset

TINY = """--models resnet18 --repeats 1 --steps 1 --untimed 1 --batch 32 --epochs 1 --train-batch 32
    --memory-mb 64""".split()  # noqa: SIM905


def measured(what: str, precision: str, turn: int, **figures: Any) -> dict[str, Any]:
    return {"what": what, "model": "resnet18", "precision": precision, "turn": turn, **figures}


def test_rows_by_hand() -> None:
    """Speeds of 100, 50, 200 beside 200, 150, 300 in the same turns: ratios of 2, 3 and 1.5."""
    speeds = {"fp32": (100.0, 50.0, 200.0), "bf16": (200.0, 150.0, 300.0)}
    everything = [
        measured("speed", name, turn, images_per_second=speed, peak_mb=10.0 + turn)
        for name, found in speeds.items()
        for turn, speed in enumerate(found)
    ]
    everything.append(measured("largest", "bf16", 0, largest=96))
    everything += [measured("accuracy", "bf16", seed, top1=top1) for seed, top1 in ((0, 0.5), (7, 0.6))]
    fp32, bf16 = precision.make_rows(everything)
    assert (fp32["speedup"]["median"], fp32["largest"], fp32["top1"], fp32["peak_mb"]) == (1.0, None, None, 12.0)
    assert bf16["images_per_second"]["median"] == 200
    assert [bf16["speedup"][key] for key in ("n", "min", "median", "max")] == [3, 1.5, 2.0, 3.0]
    assert (bf16["largest"], bf16["top1"]["median"], bf16["top1"]["n"]) == (96, 0.55, 2)


@pytest.mark.long
@pytest.mark.weekly
def test_precision_all_of_it_at_a_tiny_size(tmp_path: Path) -> None:
    write_dataset(tmp_path / "data", train_per_class=4, val_per_class=1, side_pixels=(32, 32))
    out = tmp_path / "out.json"

    def run(*words: str) -> "subprocess.CompletedProcess[str]":
        options = (*TINY, "--data", tmp_path / "data", "--out", out)
        return run_benchmark("gpu.precision", *options, *words, timeout=280)

    done = run("--precisions", "fp32", "tf32")
    assert done.returncode == 0, done.stderr
    assert "tf32 is left out: a CPU trains in fp32 then" in done.stderr
    record = json.loads(out.read_text())
    assert [each["what"] for each in record["measurements"]] == ["speed", "largest", "accuracy"]
    (row,) = record["rows"]
    assert row["images_per_second"]["median"] > 0
    assert row["peak_mb"] > 100, "fp32 weights, gradients and momentum of 11 million"
    assert 0 <= row["top1"]["median"] <= 1
    assert "| resnet18 | fp32 | " in out.with_suffix(".md").read_text()

    again = run("--precisions", "fp32", "tf32")
    assert again.returncode == 0, again.stderr
    assert json.loads(out.read_text())["measurements"] == record["measurements"], "nothing was measured again"
    other = run("--precisions", "fp32")
    assert other.returncode == 1
    assert "was measured with another options: name another --out" in other.stderr
