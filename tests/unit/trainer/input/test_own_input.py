"""Data sets, loaders and augmentations of other packages: a run trains with them, or refuses them in one line."""

import json
import shutil
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from error_texts import naming

from bigbatch.errors import ConfigError, DataError
from bigbatch.trainer.augment.crops import center_crop
from bigbatch.trainer.augment.own import make_own_augmentations
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.sections import DataConfig
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.in_python import train
from bigbatch.trainer.input.base import Request
from bigbatch.trainer.input.data_root import DataRoot, open_split
from bigbatch.trainer.input.loaders.own import ImportedLoader
from bigbatch.trainer.input.order import read_index

EXAMPLE = Path(__file__).parents[4] / "examples/own_input.py"
TRAINS = {
    "data.loader": "torchvision",
    "data.image_size": 16,
    "data.probe_seconds": 0.01,
    "model.options.width": 2,
    "batch.global_batch_size": 16,
    "batch.microbatch_size": 8,
    "batch.bn_span": 8,
    "run.epochs": 1,
    "run.log_every_steps": 1,
    "run.loggers": [],
    "schedule.warmup_epochs": 0,
}
UNFIT = """
from dataclasses import replace
from own_input import *

class Loose:
    num_draws = 0
    def __call__(self, images_BCHW, *, draws_BD):
        return images_BCHW - images_BCHW.float().mean().to(torch.uint8)

class Floats(Loose):
    def __call__(self, images_BCHW, *, draws_BD):
        return images_BCHW.float()

class Breaks(Loose):
    def __call__(self, images_BCHW, *, draws_BD):
        raise KeyError("a\\nb")

class NoDraws:
    def __call__(self, images_BCHW, *, draws_BD):
        return images_BCHW

class Lists(PlainLoader):
    def load(self, requests):
        return (list(request.indices_B) for request in requests)

class Small(PlainLoader):
    def load(self, requests):
        for batch in super().load(requests):
            yield Batch(batch.images_BCHW[:, :, 1:], batch.labels_B, batch.valid_B, batch.request)

class Reversed(PlainLoader):
    def load(self, requests):
        for request in requests:
            yield from super().load([replace(request, indices_B=request.indices_B[::-1])])

class Twice(PlainLoader):
    def load(self, requests):
        for batch in super().load(requests):
            yield from (batch, batch)

class Unlabelled(ZipImages):
    def __init__(self, split, path):
        super().__init__(split, path)
        self.labels_N = self.labels_N[1:]

class Listed(ZipImages):
    def __init__(self, split, path):
        super().__init__(split, path)
        self.classes = list(self.classes)

class Outside(ZipImages):
    def __init__(self, split, path):
        super().__init__(split, path)
        self.labels_N = self.labels_N + 1

class Turned(ZipImages):
    def __init__(self, split, path):
        super().__init__(split, path)
        self.classes = self.classes if split == "train" else self.classes[::-1]

def function():
    pass
"""


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make images in class folders, and the same in a zip archive."""
    folder = tmp_path_factory.mktemp("images")
    write_dataset(folder / "shapes", train_per_class=8, val_per_class=2, side_pixels=(32, 40))
    with zipfile.ZipFile(folder / "shapes.zip", "w") as archive:
        for path in sorted((folder / "shapes").rglob("*")):
            if path.suffix in (".jpg", ".jpeg", ".png", ".webp", ".JPEG"):
                archive.write(path, path.relative_to(folder / "shapes"))
    return folder


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the example, and unfit classes, into a folder outside of the tree."""
    (tmp_path / "code").mkdir()
    shutil.copy(EXAMPLE, tmp_path / "code")
    (tmp_path / "code/unfit.py").write_text(UNFIT)
    monkeypatch.syspath_prepend(tmp_path / "code")
    for name in ("own_input", "unfit"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def losses(images: Path, run: Path, **changed: object) -> list[float]:
    """Train for an epoch; return the loss of each step."""
    keys = {key.replace("__", "."): value for key, value in changed.items()}
    train("quickstart", {**TRAINS, "data.root": str(images / "shapes"), "run.directory": str(run), **keys}, quiet=True)
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if record["kind"] == "train"]


def refused(*words: object, call: Callable[[], object]) -> None:
    with pytest.raises(ConfigError, match=naming(*map(str, words))) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_run_trains_with_all_three(images: Path, tmp_path: Path) -> None:
    """The archive gives the bits of the class folders; the augmentation changes them."""
    own = f"class:own_input.ZipImages:{images}/shapes.zip"
    folders = losses(images, tmp_path / "folders")
    assert len(folders) == 5
    assert losses(images, tmp_path / "zip", data__root=own) == folders
    both = {"data__root": own, "data__loader": "own_input.PlainLoader"}
    plain = losses(images, tmp_path / "plain", **both)
    assert plain == pytest.approx(folders, rel=0.05)
    assert losses(images, tmp_path / "all", **both, augment__custom={"invert": "own_input.Invert"}) != plain


def test_own_images_are_those_of_the_folders(images: Path) -> None:
    root = f"class:own_input.ZipImages:{images}/shapes.zip"
    ours, theirs = open_split(root, "train"), read_index(images / "shapes", "train")
    assert ours.classes == theirs.classes == DataRoot(root).classes("val")
    assert [ours.read(i) for i in range(len(ours))] == [theirs.read(i) for i in range(len(theirs))]
    assert len(open_split(root, "val", classes=ours.classes)) == 20
    with pytest.raises(DataError, match="another order"):
        open_split(f"class:unfit.Turned:{images}/shapes.zip", "val", classes=ours.classes)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.Images", "No module named 'nowhere'"),
        ("own_input.ZipImage", "own_input has no ZipImage; the nearest is ZipImages"),
        ("own_input.Invert", "must be a class with the methods __len__"),
        ("unfit.function", "not a function"),
        ("subprocess.Popen", "must be a class with the methods"),
        ("unfit.Unlabelled", "labels_N must be an int64 array with a label for each of 80 images"),
        ("unfit.Listed", "classes must be a tuple"),
        ("unfit.Outside", "from 0 to 9"),
    ],
)
def test_unfit_data_set_is_refused(name: str, words: str, images: Path) -> None:
    refused(f"data.root=class:{name}", words, call=lambda: open_split(f"class:{name}:{images}/shapes.zip", "train"))


def test_missing_archive_is_one_line() -> None:
    refused("cannot be made: FileNotFoundError", call=lambda: open_split("class:own_input.ZipImages:no.zip", "train"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.Loader", "No module named 'nowhere'"),
        ("own_input.Plain", "own_input has no Plain; the nearest is PlainLoader"),
        ("own_input.Invert", "must be a class with the methods load, close, and has no load"),
        ("unfit.Lists", "yields a list"),
        ("unfit.Reversed", "yields a batch of other images than the next request asks for"),
        ("unfit.Twice", "yields a batch of other images than the next request asks for"),
        ("unfit.Small", "images_BCHW of (8, 3, 15, 16) torch.uint8, not (8, 3, 16, 16)"),
    ],
)
def test_unfit_loader_is_refused(name: str, words: str, images: Path, tmp_path: Path) -> None:
    refused(f"data.loader={name}", words, call=lambda: losses(images, tmp_path / "run", data__loader=name))


def test_own_loader_gives_the_asked_indices_of_an_image_that_is_drawn_again(images: Path) -> None:
    """From them come the draws of cutout and mix, which would else be equal for each repeat in an epoch."""
    from own_input import PlainLoader

    index = read_index(images / "shapes", "train")
    setup: Any = SimpleNamespace(source=index, crop=center_crop(fraction=1.0), image_size=lambda epoch: 8)
    setup.data = DataConfig(loader="own_input.PlainLoader")
    asked = [Request(1, np.array([3, 3 + len(index), 7 + 5 * len(index)]), np.ones(3, bool)) for _ in range(3)]
    found = list(ImportedLoader(PlainLoader(setup), setup).load(iter(asked)))
    assert [batch.request for batch in found] == asked
    assert [batch.positions for batch in found] == [[3, 3, 7]] * 3


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere.Blur", "No module named 'nowhere'"),
        ("own_input.Inverts", "the nearest is Invert"),
        ("own_input.ZipImages", "must be a class with the methods __call__, and has no __call__"),
        ("functools.partial", "is of a library"),
        ("unfit.NoDraws", "needs an attribute num_draws"),
        ("unfit.Loose", "in a batch with other images"),
        ("unfit.Floats", "returns (4, 3, 8, 8) torch.float32 for uint8 images"),
        ("unfit.Breaks", "fails on images of shape (4, 3, 8, 8): KeyError"),
    ],
)
def test_unfit_augmentation_is_refused(name: str, words: str) -> None:
    refused(
        f"augment.custom: x={name}",
        words,
        call=lambda: make_own_augmentations({"x": name}, device="cpu", image_size=8),
    )


def test_options_and_names_of_augmentations() -> None:
    entry = {"name": "own_input.Invert", "options": {"probability": 0.2}}
    first, second = make_own_augmentations({"a": entry, "b": "own_input.Invert"}, device="cpu", image_size=8)
    assert getattr(first.change, "probability", None) == 0.2
    assert first.stream != second.stream
    refused(
        "cannot be made: TypeError",
        call=lambda: make_own_augmentations({"a": {**entry, "options": {"p": 1}}}, device="cpu", image_size=8),
    )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("data.loader", "tochvision", "must be one of 'dali', 'torchvision', 'resident', 'synthetic'"),
        ("data.loader", "own input.Loader", "or an import path"),
        ("data.root", "class:images", "data.root=class:images must name the import path of a class"),
        ("augment.custom", "{blur: Blur}", "augment.custom: blur is 'Blur': give an import path"),
        ("augment.custom", "{b l: a.B}", "augment.custom: 'b l' is not a legal name of an augmentation"),
    ],
)
def test_names_of_another_form_are_refused(key: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=naming(words)):
        load_config(["--config", "quickstart", f"--{key}={value}"])


def test_staging_and_cache_have_no_meaning_for_a_class() -> None:
    root = ["--config", "quickstart", "--data.root=class:own_input.ZipImages:s3://x"]
    refused("data.stage=x conflicts", call=lambda: load_config([*root, "--data.stage=x"]))
    refused("a class: set it to null", call=lambda: load_config([*root, "--data.cache_dir=x"]))


def test_loader_takes_both_crops_and_staging() -> None:
    words = ["--config", "quickstart", "--data.loader=own_input.PlainLoader", "--data.crop=padded", "--data.stage=x"]
    assert load_config([*words, "--data.crop_area_min=null"]).data.stage == "x"
