"""Input patch whitening against numpy's covariance, and what becomes of its weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from bigbatch.comm.connect import connect
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build.whitening import fit_whitening_
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.models.resnet9 import resnet9
from bigbatch.trainer.models.whitening import PATCH, PatchWhitening, patch_sums, whitening_filters
from bigbatch.trainer.step.precision import to_half_

STD = (0.25, 0.2, 0.3)
EPS = 0.01


def smooth_images(count: int = 12, side: int = 16) -> Tensor:
    """Neighbouring pixels and colours are alike, as in photographs; uint8."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 4, 4, generator=generator) + torch.rand(count, 1, 4, 4, generator=generator)
    fine = F.interpolate(coarse, size=(side, side), mode="bilinear")
    return ((fine + 0.05 * torch.rand(fine.shape, generator=generator)) * 120).to(torch.uint8)


def patches_of(images_BCHW: Tensor) -> np.ndarray[Any, Any]:
    """(patches, 27) by plain indexing: colour, row, column."""
    images = images_BCHW.numpy()
    height, width = images.shape[2:]
    rows = [
        images[b, :, y : y + 3, x : x + 3].ravel()
        for b in range(len(images))
        for y in range(height - 2)
        for x in range(width - 2)
    ]
    return np.array(rows)


def test_whitening_patches_that_were_whitened_have_no_covariance() -> None:
    images_BCHW = smooth_images()
    filters = whitening_filters(patch_sums(images_BCHW), std=STD, eps=EPS)
    normalized = images_BCHW.double() / 255 / torch.tensor(STD, dtype=torch.float64).view(3, 1, 1)
    whitened = F.conv2d(normalized, filters).permute(1, 0, 2, 3).reshape(PATCH, -1).numpy()
    variances = np.linalg.eigvalsh(np.cov(patches_of(normalized).T, bias=True))[::-1]
    assert variances[0] / variances[-1] > 100, "there must be something to whiten"
    np.testing.assert_allclose(np.cov(whitened, bias=True), np.diag(variances / (variances + EPS)), atol=1e-9)
    exact = F.conv2d(normalized, whitening_filters(patch_sums(images_BCHW), std=STD, eps=1e-12))
    np.testing.assert_allclose(
        np.cov(exact.permute(1, 0, 2, 3).reshape(PATCH, -1).numpy(), bias=True), np.eye(PATCH), atol=1e-6
    )


def test_whitening_sums_are_exact_in_any_order() -> None:
    images_BCHW = smooth_images()
    sums = patch_sums(images_BCHW)
    patches = np.concatenate([patches_of(images_BCHW).astype(np.int64), np.ones((12 * 14 * 14, 1), np.int64)], axis=1)
    assert np.array_equal(sums.numpy(), (patches.T @ patches).astype(np.float64))
    parts = [patch_sums(part) for part in images_BCHW.flip(0).split(5)]
    assert torch.equal(sum(parts, torch.zeros_like(sums)), sums)


def test_whitening_signs_do_not_depend_on_the_library() -> None:
    filters = whitening_filters(patch_sums(smooth_images()), std=STD, eps=EPS).view(PATCH, -1)
    assert (filters.max(1).values > -filters.min(1).values).all()


def test_whitening_images_of_one_colour_give_numbers() -> None:
    sums = patch_sums(torch.full((2, 3, 8, 8), 77, dtype=torch.uint8))
    assert whitening_filters(sums, std=STD, eps=EPS).isfinite().all()


def test_whitening_weights_are_saved_and_nothing_updates_or_rounds_them() -> None:
    model = resnet9(width=2, is_whitened=True, norm_scale=0.25)
    names = [name for name, _ in model.named_parameters()]
    assert "prep.0.weight" not in names
    assert model.state_dict()["prep.0.weight"].shape == (27, 3, 3, 3)
    assert model.get_parameter("prep.1.weight").shape == (2, 27, 1, 1)
    to_half_(model, torch.bfloat16)
    layer = model.get_submodule("prep.0")
    assert layer.weight.dtype == torch.float32
    assert layer(torch.zeros(1, 3, 8, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_whitening_before_it_is_fitted_has_a_pixel_in_each_channel() -> None:
    images_BCHW = torch.randn(1, 3, 8, 8)
    channels = PatchWhitening()(images_BCHW)
    torch.testing.assert_close(channels[:, 4], images_BCHW[:, 0])
    torch.testing.assert_close(channels[:, 9, 1:, 1:], images_BCHW[:, 1, :-1, :-1])


# fitted to the training images of a run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for index, image in enumerate(smooth_images(11, side=32)):
            path = tmp_path / split / "ab"[index % 2] / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(path)
    return tmp_path


def config_of(root: Path, **words: object) -> Config:
    settings = {
        "data.num_classes": 2,
        "batch.global_batch_size": 4,
        "batch.bn_span": 4,
        "model.options.whitening_eps": EPS,
    }
    settings |= {"data.root": root, "batch.microbatch_size": 4, **words}
    return load_config(["--config", "cifar10", *(f"--{key}={value}" for key, value in settings.items())])


def fitted(config: Config) -> Tensor:
    communicator = connect(env=ALONE, backend="gloo")
    split, _ = build_input.make_splits(config, communicator)
    model = resnet9(width=2, is_whitened=True)
    fit_whitening_(model, split, config=config, communicator=communicator)
    return model.state_dict()["prep.0.weight"]


@pytest.mark.long
def test_whitening_whole_images_of_the_training_set_are_whitened(root: Path) -> None:
    """All 11, neither cropped nor flipped; a microbatch that has to be filled up changes no bit."""
    config = config_of(root)
    want = whitening_filters(patch_sums(smooth_images(11, side=32)), std=config.data.std, eps=EPS).float()
    assert torch.equal(fitted(config), want)
    other = config_of(root, **{"batch.microbatch_size": 2, "batch.bn_span": 2, "run.seed": 7})
    assert torch.equal(fitted(other), want)


@pytest.mark.slow
def test_whitening_given_weights_bring_their_own(root: Path) -> None:
    unfitted = PatchWhitening().weight
    assert torch.equal(fitted(config_of(root, **{"model.weights": "some.pt"})), unfitted)
    assert torch.equal(fitted(config_of(root, **{"model.options.whitening_eps": "null"})), unfitted)
