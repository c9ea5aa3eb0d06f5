"""Shared by the tests of the input."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from image_loaders import made_loaders
from sample_images import encoded, smooth_image, write

from bigbatch.trainer.datasets.pack import PackRecipe, pack
from bigbatch.trainer.input import retry
from bigbatch.trainer.input.loaders.encoded import ImageLoader


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give reads enough time on a slow machine; tests of stuck reads set their own limit."""
    monkeypatch.setattr(retry, "GRACE_SECONDS", 60.0)


@pytest.fixture(params=["torchvision", "dali"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[..., ImageLoader]]:
    """A maker of each loader of images, with the SETTINGS of the test's file."""
    with made_loaders(request.param, request.module.SETTINGS) as make:
        yield make


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders with the NUM_IMAGES of the test's file in each split."""
    images = {n: encoded(smooth_image(n, 90 + n, 70)) for n in range(request.module.NUM_IMAGES)}
    files = {f"{split}/{'ab'[n % 2]}/{n}.jpg": images[n] for n in images for split in ("train", "val")}
    return write(tmp_path_factory.mktemp("folder"), files)


@pytest.fixture(scope="module")
def packed(request: pytest.FixtureRequest, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same in shards of the file's SHARD_BYTES."""
    target = tmp_path_factory.mktemp("packed")
    pack(folder, target, recipe=PackRecipe(shard_bytes=request.module.SHARD_BYTES))
    return target
