"""MLPerf's rules for ResNet-50 with LARS, checked against a config.

Sources: mlcommons/training_policies:training_rules.adoc (the rows of ResNet), and the reference, whose other values the
closed division keeps, mlcommons/training:retired_benchmarks/resnet-tf1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bigbatch.trainer.config.schema import Config, lookup, with_defaults
from bigbatch.trainer.config.sections import IMAGENET_COUNTS

TARGET_TOP1 = 0.759
FREE_MOMENTUM_BATCH = 32_768
"""From this batch size on, momentum may be any constant."""
SAMPLES = {"train_samples": IMAGENET_COUNTS["train"], "eval_samples": IMAGENET_COUNTS["val"]}

FIXED = {
    "run.eval_every_epochs": 4,
    "run.target_top1": TARGET_TOP1,
    "optimizer.name": "lars",
    "optimizer.options.eps": 0.0,
    "schedule.name": "polynomial",
    "schedule.options.power": 2.0,
    "schedule.end_lr": 1e-4,
}
"""Key -> value that the rules fix."""
REFERENCE = {
    "data.num_classes": 1000,
    "data.image_size": 224,
    "data.train_sizes": None,
    "data.crop": "resized",
    "data.flip": True,
    "data.eval_flip": False,
    **{key: off for key, off in with_defaults({}).items() if key.startswith("augment.")},
    "model.name": "resnet50",
    "model.options.blurpool": False,
    "model.weights": None,
    "model.frozen": None,
    "optimizer.loss": "cross_entropy",
    "optimizer.loss_options": None,
    "optimizer.options.nesterov": False,
    "optimizer.exclude_bias_and_norm": True,
    "optimizer.bias_lr_factor": 1.0,
    "optimizer.lr_factors": None,
    "optimizer.clip_norm": None,
    "optimizer.ema_decay": None,
    "schedule.low_momentum": None,
}
"""Key -> value of the reference."""
RECIPES = {
    "model.init": None,
    "model.linear_std": None,
    "data.crop_area_min": 0.08,
    "data.eval_crop_fraction": 0.875,
    "optimizer.options.trust_coefficient": 0.001,
}
"""Key -> value in our recipes, which the rules and convergence points assume: initial weights and crops are
torchvision's, the coefficient is LARSETA of NVIDIA's v4.0 submission."""


@dataclass(frozen=True)
class Verdict:
    """Result of one rule. holds is None if unknown."""

    rule: str
    value: str
    legal: str
    holds: bool | None


def check_rules(config: Config, job: Mapping[str, Any]) -> list[Verdict]:
    """Return a verdict for each rule. job: facts of the run (FinishedRun.job)."""
    exact = [
        _exactly(key, lookup(config, key), legal, because=because)
        for because, rules in (("rule", FIXED), ("reference", REFERENCE), ("as in the recipes", RECIPES))
        for key, legal in rules.items()
    ]
    counts = [_exactly(key, job[key], legal, because="ImageNet") for key, legal in SAMPLES.items()]
    return [*exact, *_check_choices(config), *counts]


def _check_choices(config: Config) -> list[Verdict]:
    optimizer, batch_size = config.optimizer, config.batch.global_batch_size
    is_free = batch_size >= FREE_MOMENTUM_BATCH
    momenta = "any constant from a batch of 32k on" if is_free else "0.9 below a batch of 32k"
    rules = (
        ("momentum", momenta, is_free or optimizer.momentum == 0.9),
        ("weight_decay", "0.0001 x 2^N", _is_power_of_two(optimizer.weight_decay / 1e-4)),
        ("label_smoothing", "0 or 0.1", optimizer.label_smoothing in (0.0, 0.1)),
    )
    return [Verdict(f"optimizer.{key}", _text(getattr(optimizer, key)), legal, holds) for key, legal, holds in rules]


def _is_power_of_two(factor: float) -> bool:
    """Return whether factor is 2**N, up to the 1e-5 in N that MLPerf's compliance checker allows."""
    return factor > 0 and abs(math.log2(factor) - round(math.log2(factor))) < 1e-5


def _exactly(rule: str, value: object, legal: object, *, because: str) -> Verdict:
    return Verdict(rule, _text(value), f"{_text(legal)} ({because})", value == legal)


def _text(value: object) -> str:
    """Write a value for people: null, true, 1,000."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:,}" if isinstance(value, int) else str(value)
