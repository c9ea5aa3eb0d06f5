"""The pilots are their recipes by one rule of scale, and learn."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from bigbatch.trainer import train
from bigbatch.trainer.build import job
from bigbatch.trainer.config.file import PACKAGED, load_config, packaged_configs
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.folder.folder import RunDir, read_records

PILOTS = [name for name in packaged_configs() if name.startswith("pilots/")]
SCALED = {
    "run": ("epochs", "divergence_steps"),
    "data": ("image_size", "train_sizes"),
    "batch": ("global_batch_size", "microbatch_size", "bn_span"),
    "schedule": ("base_lr", "warmup_epochs", "decay_epochs"),
}
OURS = {
    "run": ("directory", "log_every_steps", "eval_every_epochs", "eval_offset_epochs", "checkpoint_every_steps"),
    "data": ("root", "num_classes", "num_threads"),
}
"""Keys of place and output of a pilot, and target_top1 and precision, as the page says."""


def recipe_of(name: str) -> str:
    return str(yaml.safe_load((PACKAGED / f"{name}.yaml").read_text())["base"])


def loaded(name: str) -> Config:
    return load_config(["--config", name])


def sized(pixels: int) -> int:
    return 8 * round(pixels * 2 / 7 / 8)


def test_pilots_are_of_every_family() -> None:
    families = {
        recipe_of(name).removeprefix("imagenet/").replace("resnet50_", "mlperf_").split("_")[0] for name in PILOTS
    }
    assert families == {"mlperf", "nus", "fast", "jia", "alexnet", "nesterov", "issue272"}


@pytest.mark.parametrize("name", PILOTS)
def test_pilot_is_its_recipe_by_the_rule(name: str) -> None:
    pilot, recipe = loaded(name), loaded(recipe_of(name))
    assert pilot.batch.global_batch_size == recipe.batch.global_batch_size / 128
    span = min(recipe.batch.bn_span, pilot.batch.global_batch_size)
    assert (pilot.batch.microbatch_size, pilot.batch.bn_span) == (span, span)
    assert pilot.run.epochs == round(recipe.run.epochs / 5)
    assert pilot.run.divergence_steps == pytest.approx((recipe.run.divergence_steps or 0) / 5)
    assert pilot.schedule.warmup_epochs == pytest.approx(recipe.schedule.warmup_epochs / 5)
    if recipe.schedule.decay_epochs is not None and pilot.schedule.decay_epochs is not None:
        assert pilot.schedule.decay_epochs == pytest.approx(recipe.schedule.decay_epochs / 5)
    factor = 128**0.5 if pilot.optimizer.name == "lars" else 128
    assert pilot.schedule.base_lr == pytest.approx(recipe.schedule.base_lr / factor, rel=3e-3)
    assert pilot.data.image_size == sized(recipe.data.image_size)
    sizes = recipe.data.train_sizes
    assert pilot.data.train_sizes == (sizes and tuple((round(epoch / 5), sized(pixels)) for epoch, pixels in sizes))
    assert pilot.run.target_top1 is None
    assert pilot.optimizer.precision == ("fp32" if recipe.optimizer.precision == "fp32" else "bf16")


@pytest.mark.parametrize("name", PILOTS)
def test_pilot_leaves_all_else_as_the_recipe_has_it(name: str) -> None:
    pilot, recipe = asdict(loaded(name)), asdict(loaded(recipe_of(name)))
    both: dict[str, Any] = {
        "run": ("target_top1",),
        "optimizer": ("precision", "loss_scale", "loss_scale_growth_steps"),
    }
    for section, keys in recipe.items():
        free = (*SCALED.get(section, ()), *OURS.get(section, ()), *both.get(section, ()))
        for key, value in keys.items():
            assert key in free or pilot[section][key] == value, f"{section}.{key}"


@pytest.fixture(scope="module")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_dataset(folder, train_per_class=26, val_per_class=2, side_pixels=(40, 40))
    return folder


@pytest.mark.long
def test_pilot_learns(tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On ten classes of generated images, by a smaller net at a smaller batch, its rate by the same rule."""
    monkeypatch.setattr(job, "set_up_process", lambda communicator, **_: None)
    name = "pilots/mlperf"
    pilot = loaded(name)
    smaller = pilot.batch.global_batch_size // 32
    rate = pilot.schedule.base_lr / smaller**0.5
    changes: dict[str, object] = {
        "run.directory": tmp_path,
        "run.eval_every_epochs": pilot.run.epochs,
        "data.loader": "torchvision",
        "data.root": tiny_data,
        "data.image_size": 32,
        "data.probe_seconds": 0,
        "data.crop_area_min": 0.35,
        "model.name": "resnet9",
        "model.options.width": 8,
        "model.options.pool_first": "true",
        "model.options.logit_scale": 0.125,
        "batch.global_batch_size": 32,
        "batch.microbatch_size": 32,
        "batch.bn_span": 32,
        "optimizer.precision": "fp32",
        "schedule.base_lr": rate,
    }
    assert train.main(["--config", name, *(f"--{key}={value}" for key, value in changes.items()), "--quiet"]) == 0
    losses = [record["loss"] for record in read_records(RunDir(tmp_path).metrics) if record["kind"] == "train"]
    assert losses[-1] < 0.93 * losses[0]
