"""A real ablation on the embedded data set, at few steps: one step fails, the others have figures."""

import json
from pathlib import Path

import pytest
import yaml

from bigbatch.cli import main
from bigbatch.trainer.datasets.generated import write_dataset

pytestmark = pytest.mark.long


OPTIONS = {
    "data.loader": "torchvision",
    "data.image_size": 16,
    "data.probe_seconds": 0,
    "model.width": 2,
    "batch.global_batch_size": 32,
    "batch.microbatch_size": 32,
    "batch.bn_span": 16,
    "optimizer.precision": "fp32",
    "run.log_every_steps": 1,
}
STEPS = {
    "baseline": {"model.pool_first": False},
    "seven classes": {"data.num_classes": 7},  # there are ten: only the run can tell
    "whitening": {"data.num_classes": 10, "model.whitening_eps": 0.01, "model.norm_scale": 0.25},
}


def test_ablation_goes_on_with_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "shapes", train_per_class=7, val_per_class=1, side_pixels=(32, 36))
    stated = {
        "name": "tiny",
        "config": "quickstart",
        "options": OPTIONS | {"data.root": str(tmp_path / "shapes")},
        "steps": STEPS,
        "target_top1": None,
        "ranks": 1,
        "timeout_minutes": 10,
    }
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(stated, sort_keys=False))
    out = tmp_path / "out"
    command = ["ablate", str(tmp_path / "tiny.yaml"), "--folder", str(out), "--epochs", "2"]
    assert main([*command, "--only", "whitening"]) == 0
    assert "1 runs, 1 to do" in capsys.readouterr().out
    assert main(command) == 3
    assert "3 runs, 2 to do" in capsys.readouterr().out
    steps = {step["name"]: step for step in json.loads((out / "ablation.json").read_text())["steps"]}
    assert [len(steps[name]["runs"]) for name in STEPS] == [1, 0, 1]
    assert "data.num_classes=7, but" in steps["seven classes"]["undone"][0]
    for name in ("baseline", "whitening"):
        (result,) = steps[name]["runs"]
        assert result["epochs"] == 2
        assert 0 < result["seconds"] < 600
        assert 0 <= result["top1"] <= 1
    assert "| whitening | 1 | 2 |" in (out / "ablation.md").read_text()
