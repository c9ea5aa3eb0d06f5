"""benchmarks.gpu.precision: its arithmetic by hand, and all of it at a tiny size."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from benchmark_process import run_benchmark

from bigbatch.trainer.datasets.generated import write_dataset

TINY = """--models resnet18 --repeats 1 --steps 1 --untimed 1 --batch 32 --epochs 1 --train-batch 32
    --memory-mb 64""".split()  # noqa: SIM905


def measured(what: str, precision: str, turn: int, **figures: Any) -> dict[str, Any]:
    return {"what": what, "model": "resnet18", "precision": precision, "turn": turn, **figures}


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
