"""A real ablation on the embedded data set, at few steps: one step fails, the others have figures."""

import json
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigbatch.cli import main
from bigbatch.interpreter import bigbatch_argv
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.folder.folder import RunDir, read_records

pytestmark = pytest.mark.long


OPTIONS = {
    "data.loader": "torchvision",
    "data.image_size": 16,
    "data.probe_seconds": 0,
    "model.options.width": 2,
    "batch.global_batch_size": 32,
    "batch.microbatch_size": 32,
    "batch.bn_span": 16,
    "optimizer.precision": "fp32",
    "run.log_every_steps": 1,
}
STEPS = {
    "baseline": {"model.options.pool_first": False},
    "seven classes": {"data.num_classes": 7},  # there are ten: only the run can tell
    "whitening": {"data.num_classes": 10, "model.options.whitening_eps": 0.01, "model.options.norm_scale": 0.25},
}


def write_ablation(folder: Path, *, steps: dict[str, dict[str, Any]], **changes: Any) -> str:
    write_dataset(folder / "shapes", train_per_class=7, val_per_class=1, side_pixels=(32, 36))
    stated = {
        "config": "quickstart",
        "options": OPTIONS | {"data.root": str(folder / "shapes")},
        "cumulative": True,
        "cases": steps,
        "timeout_minutes": 10,
    } | changes
    (folder / "tiny.yaml").write_text(yaml.safe_dump(stated, sort_keys=False))
    return str(folder / "tiny.yaml")


@pytest.mark.weekly
def test_ablation_goes_on_with_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    forms = {"bf16, folded": ["--optimizer.precision=bf16", "--fold"]}
    command = ["sweep", write_ablation(tmp_path, steps=STEPS, inference=forms), "--folder", str(out), "--epochs", "2"]
    assert main([*command, "--only", "whitening"]) == 0
    assert "3 points, 1 to run" in capsys.readouterr().out
    assert main(command) == 3
    printed = capsys.readouterr().out
    assert "3 points, 2 to run" in printed
    cells = {cell["case"]: cell for cell in facts_of(out)["cells"]}
    assert list(cells) == ["baseline", "whitening"]
    assert "data.num_classes=7, but" in facts_of(out)["unmeasured"][0][2]
    for cell in cells.values():
        assert (cell["n"], cell["epochs_median"]) == (1, 2)
        assert 0 < cell["seconds_median"] < 600
        assert 0 <= cell["top1_mean"] <= 1
    text = (out / "report/report.md").read_text()
    assert "| whitening | 1 |" in text
    assert "Inference with what whitening trained" in text
    assert "Inference with what whitening trained" in printed
    told = (out / "points/2/evaluate--optimizer.precision=bf16--fold.txt").read_text()
    assert "(bf16, 8 of 8 norms folded)" in told


def test_ablation_that_was_stopped_goes_on_from_the_checkpoint(tmp_path: Path) -> None:
    """Each of 80 steps counts once in the seconds; those before the stop are not repeated."""
    out, epochs = tmp_path / "out", 40
    file = write_ablation(tmp_path, steps={"baseline": {}})
    command = [*bigbatch_argv(), "sweep", file, "--folder", str(out), "--epochs", str(epochs)]
    run = RunDir(out / "points/0/run")
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while reports(run) < 8:
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate()
    assert process.returncode == 130, told
    assert "the same command" in told
    kept = reports(run)
    assert 8 <= kept < 2 * epochs
    before = [record["time"] for record in read_records(run.metrics) if record["kind"] == "train"]
    assert subprocess.run(command).returncode == 0
    records = list(read_records(run.metrics))
    train = [record for record in records if record["kind"] == "train"]
    assert [record["step"] for record in train] == list(range(1, 2 * epochs + 1))
    assert [record["time"] for record in train[:8]] == before[:8]
    (trained,) = facts_of(out)["trained"]
    assert trained["resumed"] == 1
    assert trained["seconds"] == pytest.approx(sum(32 / record["images_per_second"] for record in train))
    assert "1, 1 resumed" in (out / "report/report.md").read_text()


def facts_of(out: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((out / "report/report.json").read_text())
    return facts


def reports(run: RunDir) -> int:
    return sum(record["kind"] == "train" for record in read_records(run.metrics))
