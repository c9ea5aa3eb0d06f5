"""Run folders as trainings on ImageNet leave them, and what verifying them prints, for the tests of MLPerf's rules."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bigbatch.cli import main
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.folder.folder import RunDir

JOB = {
    "world_size": 128,
    "device": "a GPU",
    "accumulation_steps": 1,
    "steps_per_epoch": 156,
    "train_samples": 1_281_167,
    "eval_samples": 50_000,
}
START = 1.8e9
RULES = {
    "run.eval_every_epochs": "4 (rule)",
    "run.target_top1": "0.759 (rule)",
    "optimizer.name": "lars (rule)",
    "optimizer.options.eps": "0.0 (rule)",
    "schedule.name": "polynomial (rule)",
    "schedule.options.power": "2.0 (rule)",
    "schedule.end_lr": "0.0001 (rule)",
    "data.num_classes": "1,000 (reference)",
    "data.image_size": "224 (reference)",
    "data.train_sizes": "null (reference)",
    "data.crop": "resized (reference)",
    "data.flip": "true (reference)",
    "data.eval_flip": "false (reference)",
    "augment.color_jitter": "0.0 (reference)",
    "augment.randaugment_ops": "0 (reference)",
    "augment.randaugment_magnitude": "null (reference)",
    "augment.trivial_augment": "false (reference)",
    "augment.cutout_size": "0 (reference)",
    "augment.erasing_probability": "0.0 (reference)",
    "augment.mixup_alpha": "0.0 (reference)",
    "augment.cutmix_alpha": "0.0 (reference)",
    "augment.custom": "null (reference)",
    "model.name": "resnet50 (reference)",
    "model.options.blurpool": "false (reference)",
    "model.weights": "null (reference)",
    "model.frozen": "null (reference)",
    "optimizer.loss": "cross_entropy (reference)",
    "optimizer.loss_options": "null (reference)",
    "optimizer.options.nesterov": "false (reference)",
    "optimizer.exclude_bias_and_norm": "true (reference)",
    "optimizer.bias_lr_factor": "1.0 (reference)",
    "optimizer.lr_factors": "null (reference)",
    "optimizer.clip_norm": "null (reference)",
    "optimizer.ema_decay": "null (reference)",
    "schedule.low_momentum": "null (reference)",
    "model.init": "null (as in the recipes)",
    "model.linear_std": "null (as in the recipes)",
    "data.crop_area_min": "0.08 (as in the recipes)",
    "data.eval_crop_fraction": "0.875 (as in the recipes)",
    "optimizer.options.trust_coefficient": "0.001 (as in the recipes)",
    "optimizer.momentum": "0.9 below a batch of 32k",
    "optimizer.weight_decay": "0.0001 x 2^N",
    "optimizer.label_smoothing": "0 or 0.1",
}
"""What is legal by key, at a batch of 8,192: training_rules.adoc, resnet-tf1, and what the recipes' comments name."""


def write_run(
    folder: Path, *words: str, epochs: Sequence[int] = (38, 42), reached: bool = True, recipe: str = "resnet50_8k"
) -> Path:
    """A run folder with evaluations after those epochs; the last one is the first to reach the target."""
    config = load_config(["--config", f"imagenet/{recipe}", f"--run.directory={folder}", *words])
    folder.mkdir()
    RunDir(folder).config.write_text(dump_config(config))
    records: list[dict[str, Any]] = [{"kind": "start", "time": START, "step": 0, "job": JOB}]
    for epoch in epochs:
        done = {"step": epoch * 156, "epoch": float(epoch)}
        top1 = 0.759 if reached and epoch == epochs[-1] else 0.7589
        records.append({"kind": "train", "time": START + 60 * epoch, **done})
        records.append({"kind": "eval", "time": START + 60 * epoch + 7, **done, "top1": top1, "seconds": 6.5})
    RunDir(folder).metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def seeds(folder: Path, epochs: Sequence[int], *, recipe: str = "resnet50_8k") -> list[str]:
    """Runs that reached the target after so many epochs; None for one that did not."""
    return [
        str(write_run(folder / f"seed{seed}", f"--run.seed={seed}", epochs=(30, e), recipe=recipe))
        for seed, e in enumerate(epochs)
    ]


def verified(capsys: pytest.CaptureFixture[str], *folders: Any) -> tuple[int, dict[str, str]]:
    """Exit code, and the lines of the table by rule."""
    code = main(["verify", *map(str, folders)])
    header, *lines = (
        line for line in capsys.readouterr().out.splitlines() if not line.startswith(("log for ", "warning: "))
    )
    assert header.split() == ["holds", "rule", "value", "legal"]
    return code, {re.split(r"  +", line)[1]: line for line in lines}
