"""The matrix of the ablations, as data: forms, optimizers, cases and the settings of each."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.largebatch.ablation_data import Images
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.strict_yaml import dump_yaml, parse_yaml

Settings = Mapping[str, Any]
"""Dotted keys and their values."""

HALF_LARS = "benchmarks.largebatch.half_lars.HalfLARS"
SPAN = 64
"""Samples of a ghost batch, at every batch: what is compared is the update."""
LARGEST_MICROBATCH = 512
TUNING_SEED = 1000
"""Not a seed that is reported."""


@dataclass(frozen=True)
class Optimizer:
    """Holds settings, and where their learning rate is searched."""

    settings: Settings
    lr_low: float
    lr_high: float

    @property
    def space(self) -> str:
        """Write the range as `bigbatch tune search` takes it."""
        return f"schedule.base_lr=log:{self.lr_low}:{self.lr_high}"


LARS_ALONE = dict.fromkeys(("optimizer.trust_coefficient", "optimizer.eps", "optimizer.momentum_form"))
"""Keys that are null for every other optimizer."""
LARS_SETTINGS: Settings = {
    "optimizer.name": "lars",
    "optimizer.nesterov": False,
    "optimizer.trust_coefficient": 0.001,
    "optimizer.eps": 0.0,
    "optimizer.momentum_form": "lr_inside",
}
NO_MOMENTUM: Settings = {**LARS_ALONE, "optimizer.momentum": None, "optimizer.nesterov": None}
CONSTANT: Settings = {
    "schedule.name": "step",
    "schedule.milestone_epochs": (),
    "schedule.gamma": 0.1,
    "schedule.end_lr": None,
    "schedule.power": None,
}
OPTIMIZERS = {
    "lars": Optimizer(LARS_SETTINGS, 1.0, 100.0),
    "nesterov": Optimizer({"optimizer.name": "sgd", "optimizer.nesterov": True, **LARS_ALONE}, 0.03, 3.0),
    "sgd": Optimizer({"optimizer.name": "sgd", "optimizer.nesterov": False, **LARS_ALONE}, 0.03, 3.0),
    "lamb": Optimizer(
        {
            **NO_MOMENTUM,
            "optimizer.name": "lamb",
            "optimizer.betas": (0.9, 0.999),
            "optimizer.eps": 1e-6,
            "optimizer.weight_decay": 0.01,
        },
        0.002,
        0.2,
    ),
    "schedule-free": Optimizer(
        {
            **NO_MOMENTUM,
            **CONSTANT,
            "optimizer.name": "schedulefree.SGDScheduleFree",
            "optimizer.options": {"momentum": 0.9},
        },
        0.1,
        10.0,
    ),
    "muon": Optimizer(
        {
            **LARS_ALONE,
            "optimizer.name": "muon",
            "optimizer.momentum": 0.95,
            "optimizer.nesterov": True,
            "optimizer.weight_decay": 0.01,
            "optimizer.vector_lr_factor": 1.0,
            "optimizer.newton_schulz_steps": 5,
            "optimizer.newton_schulz_precision": "fp32",
        },
        0.003,
        0.3,
    ),
    "shampoo": Optimizer(
        {
            **LARS_ALONE,
            "optimizer.name": "shampoo",
            "optimizer.nesterov": True,
            "optimizer.eps": 1e-6,
            "optimizer.block_size": 1024,
            "optimizer.root_every_steps": 10,
            "optimizer.factor_decay": 0.95,
        },
        0.03,
        3.0,
    ),
}
ABLATED = ("lars", "nesterov", "sgd")
"""Those of the ablations; beyond.py compares more."""
"""Two decades each, for equal trials are equal only in equally wide ranges. Page's ResNet-9 has 0.4 at batch 512 (see
configs/cifar10.yaml), in proportion 0.1 at 128 and 2 at 2496; 10 times trust 0.001 moves a weight by 1% of its norm."""


@dataclass(frozen=True)
class Form:
    """Names a data set and how much is done with it; every run has the same epochs."""

    config: str
    """Packaged experiment that the settings override."""
    images: Images
    num_train: int
    settings: Settings
    epochs: int
    batches: tuple[int, ...]
    """The last one leaves 20 steps an epoch or a little more."""
    seeds: tuple[int, ...]
    trials: int
    tune_epochs: int
    precision_batch: int
    precision_epochs: int
    images_per_second: Mapping[str, float] | None
    """Of training in each precision on 2 cores of an EPYC (Zen 5), for the estimate; None where no one knows."""


@dataclass(frozen=True)
class Case:
    """Describes a line of the table: an optimizer at a batch, and what differs from its plain run."""

    name: str
    family: str
    """batch, decay or precision."""
    optimizer: str
    batch: int
    epochs: int
    settings: Settings

    @property
    def study(self) -> str:
        """Name the search whose best learning rate it takes: that of its optimizer and batch."""
        return f"{self.optimizer}-{self.batch}"

    @property
    def folder(self) -> str:
        """Name the folder of its runs."""
        return self.name.replace(", ", "_").replace(" ", "_")


COMMON: Settings = {
    "run.checkpoint_every_steps": 0,
    "run.keep_checkpoints": 1,
    "data.flip": True,
    "data.eval_flip": False,
    "data.probe_seconds": 0,
    "batch.bn_span": SPAN,
    "optimizer.momentum": 0.9,
    "optimizer.weight_decay": 5.0e-4,
    "optimizer.exclude_bias_and_norm": True,
    "optimizer.label_smoothing": 0.1,
    "optimizer.precision": "fp32",
    "optimizer.loss_scale": None,
    "optimizer.loss_scale_growth_steps": None,
    "schedule.name": "cosine",
    "schedule.end_lr": 0.0,
    "schedule.power": None,
}
RESIDENT: Settings = {
    "data.loader": "resident",
    "data.resident_on": "device",
    "data.crop": "padded",
    "data.crop_area_min": None,
    "data.eval_crop_fraction": 1.0,
}

FORMS = {
    ("cifar10", "short"): Form(
        config="cifar10",
        images=Images(train_per_class=1800, val_per_class=200, resize_to=None),
        num_train=18_000,
        settings={"model.width": 8, "schedule.warmup_epochs": 1},
        epochs=5,
        batches=(128, 896),  # 140 and 20 steps an epoch
        seeds=(0, 1, 2),
        trials=5,
        tune_epochs=2,
        precision_batch=128,
        precision_epochs=1,  # a CPU is 16 times as slow in fp16
        images_per_second={"fp32": 5000, "fp16": 350},
    ),
    ("imagenette", "short"): Form(
        config="imagenette",
        images=Images(train_per_class=1000, val_per_class=200, resize_to=32),
        num_train=9_469,
        settings={**RESIDENT, "data.image_size": 32, "model.width": 8, "schedule.warmup_epochs": 2},
        epochs=10,
        batches=(128, 448),  # 73 and 21 steps an epoch
        seeds=(0, 1, 2),
        trials=5,
        tune_epochs=3,
        precision_batch=128,
        precision_epochs=2,
        images_per_second={"fp32": 5000, "fp16": 350},
    ),
    ("cifar10", "full"): Form(
        config="cifar10",
        images=Images(train_per_class=5000, val_per_class=1000, resize_to=None),
        num_train=50_000,
        settings={"model.width": 64, "schedule.warmup_epochs": 5},
        epochs=24,
        batches=(128, 512, 2048, 2496),
        seeds=(0, 1, 2, 3, 4),
        trials=16,
        tune_epochs=12,
        precision_batch=2496,
        precision_epochs=24,
        images_per_second=None,
    ),
    ("imagenette", "full"): Form(
        config="imagenette",
        images=Images(train_per_class=1000, val_per_class=500, resize_to=None),
        num_train=9_469,
        settings={"data.image_size": 128, "model.width": 64, "schedule.warmup_epochs": 5},
        epochs=40,
        batches=(128, 256, 448),
        seeds=(0, 1, 2, 3, 4),
        trials=16,
        tune_epochs=15,
        precision_batch=448,
        precision_epochs=40,
        images_per_second=None,
    ),
}


def cases(form: Form) -> list[Case]:
    """List every optimizer at every batch; decay of bias and norm at the largest; LARS in three precisions."""
    largest, low = form.batches[-1], form.precision_batch
    fp16 = {"optimizer.precision": "fp16", "optimizer.loss_scale": 1024.0, "optimizer.loss_scale_growth_steps": 2000}
    half = {
        **fp16,
        "optimizer.name": HALF_LARS,
        **LARS_ALONE,
        "optimizer.momentum": None,
        "optimizer.nesterov": None,
        "optimizer.options": {"momentum": 0.9, "trust_coefficient": 0.001},
    }

    def case(name: str, family: str, optimizer: str, batch: int, settings: Settings) -> Case:
        epochs = form.precision_epochs if family == "precision" else form.epochs
        warmup = min(form.settings["schedule.warmup_epochs"], epochs / 5)
        return Case(name, family, optimizer, batch, epochs, {"schedule.warmup_epochs": warmup, **settings})

    return [
        *(case(f"{name} {batch}", "batch", name, batch, {}) for batch in form.batches for name in ABLATED),
        case("lars, decay and adaptation on all", "decay", "lars", largest, {"optimizer.exclude_bias_and_norm": False}),
        case("nesterov, decay on all", "decay", "nesterov", largest, {"optimizer.exclude_bias_and_norm": False}),
        case("fp32", "precision", "lars", low, {}),
        case("fp16, fp32 LARS", "precision", "lars", low, fp16),
        case("fp16, half LARS", "precision", "lars", low, half),
    ]


def recipe_of(directory: Path) -> Path:
    """Return where the recipe of a run lies: beside its folder, in which names of own code would be refused."""
    return directory.with_name(f"{directory.name}.yaml")


def write_experiment(form: Form, case: Case, *, data: Path, directory: Path, seed: int, base_lr: float) -> Path:
    """Write the complete, checked experiment of a run, as a file beside its folder. Raises: ConfigError."""
    microbatches = range(SPAN, min(case.batch, LARGEST_MICROBATCH) + 1, SPAN)
    overrides = {
        **COMMON,
        **form.settings,
        **OPTIMIZERS[case.optimizer].settings,
        **case.settings,
        "data.root": str(data),
        "run.directory": str(directory),
        "run.seed": seed,
        "run.epochs": case.epochs,
        "run.eval_every_epochs": case.epochs,
        "run.log_every_steps": max(1, form.num_train // case.batch // 4),
        "batch.global_batch_size": case.batch,
        "batch.microbatch_size": max(size for size in microbatches if case.batch % size == 0),
        "schedule.base_lr": base_lr,
    }
    content = parse_yaml(dump_config(load_config(["--config", form.config])))
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        content[section][name] = value
    directory.mkdir(parents=True, exist_ok=True)
    path = recipe_of(directory)
    path.write_text(dump_yaml(content))
    load_config(["--config", str(path)])
    return path
