"""The cases of the ablations and their pictures: the matrix is complete and legal, the pictures are those stated."""

import itertools
import math
import re
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from error_texts import naming
from fake_ablations import TINY
from PIL import Image

from benchmarks.largebatch import ablation_data, ablations
from benchmarks.largebatch.ablation_cases import (
    ABLATED,
    FORMS,
    HALF_LARS,
    OPTIMIZERS,
    TUNING_SEED,
    cases,
    write_experiment,
)
from bigbatch.errors import DataError
from bigbatch.trainer.build.optimizer import make_optimizer
from bigbatch.trainer.config.file import load_config

ALL_FORMS = pytest.mark.parametrize("form", FORMS.values(), ids=["-".join(key) for key in FORMS])


# --- the matrix of the ablations ---


@ALL_FORMS
def test_matrix_is_complete(form):
    found = cases(form)
    by_batch = [(case.optimizer, case.batch) for case in found if case.family == "batch"]
    assert sorted(by_batch) == sorted((name, batch) for name in ABLATED for batch in form.batches)
    assert form.batches[0] == 128
    assert 20 <= form.num_train // form.batches[-1] <= 21
    assert len(form.seeds) >= 3
    assert TUNING_SEED not in form.seeds
    decay = [case for case in found if case.family == "decay"]
    assert [case.name for case in decay] == ["lars, decay and adaptation on all", "nesterov, decay on all"]
    assert [case.study for case in decay] == [f"{name}-{form.batches[-1]}" for name in ("lars", "nesterov")]
    assert all(case.settings["optimizer.exclude_bias_and_norm"] is False for case in decay)
    precisions = [case for case in found if case.family == "precision"]
    assert [case.settings.get("optimizer.precision") for case in precisions] == [None, "fp16", "fp16"]
    assert [case.settings.get("optimizer.name") for case in precisions] == [None, None, HALF_LARS]
    assert {case.study for case in found} == {f"{name}-{batch}" for name, batch in by_batch}
    assert len({case.folder for case in found}) == len(found)
    assert {case.epochs for case in found if case.family != "precision"} == {form.epochs}


def test_trials_that_are_equal_search_equally_wide_ranges():
    widths = [math.log10(optimizer.lr_high / optimizer.lr_low) for optimizer in OPTIMIZERS.values()]
    assert widths == pytest.approx([2] * len(OPTIMIZERS))


@pytest.mark.parametrize("dataset", ["cifar10", "imagenette"])
def test_short_forms_fit_half_an_hour(dataset):
    text = ablations.describe(FORMS[dataset, "short"], Path("/there"))
    assert int(re.search(r"about (\d+) minutes", text)[1]) < 30


def test_half_lars_takes_its_options(tmp_path):
    case = next(case for case in cases(TINY) if case.settings.get("optimizer.name") == HALF_LARS)
    settings = experiment(TINY, case, tmp_path).optimizer
    model = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False), torch.nn.BatchNorm1d(2))
    groups = make_optimizer(settings, model, {}, lr=0.5).param_groups
    stated = {"lr": 0.5, "momentum": 0.9, "trust_coefficient": 0.001}
    for group, adapt, decay in zip(groups, (True, False), (5e-4, 0.0), strict=True):
        assert {key: group[key] for key in stated} == stated
        assert (group["adapt"], group["weight_decay"]) == (adapt, decay)


def experiment(form, case, folder, **others):
    settings = {"data": folder / "data", "directory": folder / case.folder, "seed": 3, "base_lr": 0.5} | others
    return load_config(["--config", str(write_experiment(form, case, **settings))])


@pytest.mark.long
@ALL_FORMS
def test_experiments_are_legal_and_optimizers_differ_in_nothing_else(form, tmp_path):
    for case in cases(form):
        config = experiment(form, case, tmp_path)
        assert (config.run.seed, config.schedule.base_lr, config.run.epochs) == (3, 0.5, case.epochs)
        assert config.batch.global_batch_size == case.batch
        assert config.data.root == str(tmp_path / "data")
        if case.family == "batch":
            plain = asdict(experiment(form, replace(case, optimizer="sgd"), tmp_path))
            differing = {
                (section, key)
                for section, values in asdict(config).items()
                for key, value in values.items()
                if value != plain[section][key]
            }
            alone = ("name", "nesterov", "trust_coefficient", "eps", "momentum_form")
            assert differing <= {("optimizer", key) for key in alone}


def test_search_of_a_case_is_that_of_the_plain_optimizer_on_a_seed_of_its_own(tmp_path):
    decay = next(case for case in cases(TINY) if case.family == "decay")
    assert decay.optimizer == "lars"
    command = ablations.tune_command(TINY, decay, tmp_path)
    assert command[1:5] == ["-m", "bigbatch", "tune", "search"]
    given = dict(zip(command[5::2], command[6::2], strict=True))
    assert given["--space"] == "schedule.base_lr=log:1.0:100.0"
    assert (given["--trials"], given["--epochs"], given["--prune"]) == ("5", "2", "none")
    assert given["--study"] == str(tmp_path / "tune/lars-128")
    config = load_config(["--config", given["--config"]])
    assert config.run.seed == TUNING_SEED
    assert config.schedule.base_lr == pytest.approx(10)
    assert config.optimizer.exclude_bias_and_norm is True


def test_estimate_by_hand():
    form = replace(TINY, num_train=1000, images_per_second={"fp32": 100.0, "fp16": 10.0})
    # 3 searches of 5 x 2 epochs, 5 cases of 5 epochs and one of 1, two of 1 epoch in fp16; two seeds
    images = 3 * 10 * 1000 + 2 * (5 * 5 + 1) * 1000, 2 * 2 * 1000
    seconds = images[0] / 100 + images[1] / 10 + ablations.START_SECONDS * (15 + 16)
    text = ablations.describe(form, Path("/there"))
    assert f"{images[0]:,} in fp32, {images[1]:,} in fp16; about {seconds / 60:.0f} minutes" in text
    assert "no rate is known" in ablations.describe(replace(form, images_per_second=None), Path("/there"))


# --- pictures ---


@pytest.fixture
def source(tmp_path):
    """Three pictures in each of two classes and two splits, 8 x 6 pixels."""
    for split, label, number in itertools.product(("train", "val"), ("cat", "dog"), range(3)):
        path = tmp_path / "source" / split / label / f"{number}.JPEG"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 6), (80 * number, 0, 0)).save(path)
    return tmp_path / "source"


def test_images_are_the_first_of_each_class_as_they_are(source, tmp_path):
    images = ablation_data.Images(train_per_class=2, val_per_class=1, resize_to=None)
    ablation_data.write_images(images, source, tmp_path / "out")
    found = {str(path.relative_to(tmp_path / "out")): path.read_bytes() for path in tmp_path.glob("out/*/*/*")}
    expected = [f"{split}/0.JPEG" for split in ("train/cat", "train/dog", "val/cat", "val/dog")]
    expected += ["train/cat/1.JPEG", "train/dog/1.JPEG"]
    assert found == {name: (source / name).read_bytes() for name in expected}
    shutil.rmtree(source)
    ablation_data.write_images(images, source, tmp_path / "out")  # finished: the source is not needed any more


def test_images_come_small_and_without_loss(source, tmp_path):
    images = ablation_data.Images(train_per_class=1, val_per_class=5, resize_to=4)
    ablation_data.write_images(images, source, tmp_path / "out")
    found = sorted(str(path.relative_to(tmp_path / "out")) for path in tmp_path.glob("out/*/cat/*"))
    assert found == ["train/cat/0.png", "val/cat/0.png", "val/cat/1.png", "val/cat/2.png"]
    with Image.open(tmp_path / "out/val/cat/2.png") as small, Image.open(source / "val/cat/2.JPEG") as large:
        assert small.size == (4, 4)
        assert small.getpixel((1, 1)) == large.getpixel((3, 3))  # of one colour


def test_write_images_names_missing_folders(source, tmp_path):
    shutil.rmtree(source / "val")
    images = FORMS["cifar10", "short"].images
    with pytest.raises(DataError, match=naming(source / "val", "--data")):
        ablation_data.write_images(images, source, tmp_path / "out")
