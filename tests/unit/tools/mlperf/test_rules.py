"""MLPerf's rules on a run's settings: each is named where it is broken, and nothing else is."""

from pathlib import Path

import pytest
from mlperf_runs import JOB, RULES

from bigbatch.tools.mlperf.rules import check_rules
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import KEYS

ANOTHER = {
    "run.eval_every_epochs": 3,
    "run.target_top1": 0.76,
    "optimizer.options.eps": 1e-5,
    "schedule.options.power": 1.0,
    "schedule.end_lr": 0.0,
    "data.num_classes": 10,
    "data.image_size": 192,
    "data.train_sizes": "[[0,160]]",
    "data.flip": "false",
    "data.eval_flip": "true",
    "augment.color_jitter": 0.1,
    "augment.trivial_augment": "true",
    "augment.cutout_size": 2,
    "augment.erasing_probability": 0.1,
    "augment.mixup_alpha": 0.2,
    "augment.cutmix_alpha": 0.2,
    "augment.custom": "{invert: own_input.Invert}",
    "model.name": "resnet18",
    "model.options.blurpool": "true",
    "model.weights": "some.pt",
    "model.frozen": "[conv1.*]",
    "optimizer.options.nesterov": "true",
    "optimizer.bias_lr_factor": "2.0",
    "optimizer.lr_factors": "{fc.*: 2}",
    "optimizer.exclude_bias_and_norm": "false",
    "optimizer.clip_norm": 1.0,
    "schedule.low_momentum": 0.8,
    "optimizer.weight_decay": 1.5e-4,
    "optimizer.momentum": 0.91,
    "optimizer.label_smoothing": 0.2,
    "model.init": "xavier",
    "model.linear_std": 0.1,
    "data.crop_area_min": 0.35,
    "data.eval_crop_fraction": 1.0,
    "optimizer.options.trust_coefficient": 1.0,
}
WITH_OTHERS = {
    "augment.randaugment_ops": ("--augment.randaugment_ops=2", "--augment.randaugment_magnitude=9"),
    "augment.randaugment_magnitude": ("--augment.randaugment_ops=2", "--augment.randaugment_magnitude=9"),
    "optimizer.ema_decay": ("--optimizer.ema_decay=0.9", "--optimizer.ema_every_steps=1"),
    "optimizer.loss_options": ("--optimizer.loss_options={weight: balanced}",),
    "optimizer.loss": ("--optimizer.loss=mine.Loss", "--optimizer.label_smoothing=0", "--run.divergence_steps=null"),
    "schedule.name": ("--schedule.name=cosine",),
    "data.crop": (
        "--data.crop=padded",
        "--data.loader=resident",
        "--data.crop_area_min=null",
        "--data.eval_crop_fraction=1",
    ),
    "optimizer.name": ("--optimizer.name=sgd",),
}


def test_rules_every_rule_is_broken_once_below() -> None:
    assert set(RULES) == {*ANOTHER, *WITH_OTHERS}


def test_rules_see_every_augmentation() -> None:
    config = load_config(["--config", "imagenet/resnet50_8k"])
    seen = {verdict.rule for verdict in check_rules(config, JOB)}
    assert {key for key in KEYS if key.startswith("augment.")} <= seen


def broken_by(*words: str) -> set[str]:
    config = load_config(["--config", "imagenet/resnet50_8k", *words])
    return {verdict.rule for verdict in check_rules(config, JOB) if not verdict.holds}


@pytest.mark.parametrize("first", range(5))
def test_rules_that_are_broken_are_named_and_no_others(first: int) -> None:
    some = dict([*ANOTHER.items()][first::5])
    assert broken_by(*(f"--{rule}={value}" for rule, value in some.items())) == some.keys()


@pytest.mark.parametrize("rule", WITH_OTHERS)
def test_rules_a_broken_rule_is_named_among_others(rule: str) -> None:
    assert rule in broken_by(*WITH_OTHERS[rule])


@pytest.mark.parametrize(("decay", "holds"), [(5e-5, True), (4e-4, True), (2e-5, False), (0.0, False)])
def test_rules_weight_decay_is_a_power_of_two(decay: float, holds: bool) -> None:
    config = load_config(["--config", "imagenet/resnet50_8k", f"--optimizer.weight_decay={decay}"])
    (verdict,) = [v for v in check_rules(config, JOB) if v.rule == "optimizer.weight_decay"]
    assert verdict.holds is holds


def test_rules_other_images_are_told(tmp_path: Path) -> None:
    config = load_config(["--config", "imagenet/resnet50_8k"])
    broken = [v for v in check_rules(config, {**JOB, "train_samples": 9469}) if not v.holds]
    assert [(v.rule, v.value, v.legal) for v in broken] == [("train_samples", "9,469", "1,281,167 (ImageNet)")]
