"""Normalisation against its formula, and what the first batches say of data.mean and data.std, once."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from bigbatch.trainer.input.prepare_batch import FIRST_BATCHES, InputStatistics, Normalize


def batches(
    *, mean: float, std: float, count: int = FIRST_BATCHES, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [(mean + std * torch.randn(4, 3, 8, 8, generator=generator)).to(dtype) for _ in range(count)]


def hint_of(images: list[torch.Tensor], *, mean: float = 0.5, std: float = 0.25) -> str | None:
    statistics = InputStatistics()
    for each_BCHW in images:
        statistics.add(each_BCHW)
    found = statistics.hint(mean=[mean] * 3, std=[std] * 3)
    assert statistics.hint(mean=[mean] * 3, std=[std] * 3) is None, "once"
    return found


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (-0.9, 0.6), (0.8, 1.8)])
def test_input_that_is_about_normalised_is_no_news(mean: float, std: float) -> None:
    assert hint_of(batches(mean=mean, std=std)) is None


@pytest.mark.parametrize(("mean", "std"), [(0.5, 0.25), (120.0, 60.0), (1.3, 1.0), (-1.5, 1.0), (0.0, 2.5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_input_that_is_far_off_is_told_with_what_to_state(mean: float, std: float, dtype: torch.dtype) -> None:
    images = batches(mean=mean, std=std, dtype=dtype)
    hint = hint_of(images)
    assert hint is not None
    assert "far from normalised" in hint
    values = torch.stack(images).double().numpy().transpose(2, 0, 1, 3, 4).reshape(3, -1)
    own_mean, own_std = (
        [float(word) for word in hint.split(f"--data.{name} '[")[1].split("]")[0].split(",")]
        for name in ("mean", "std")
    )
    assert_allclose(own_mean, 0.5 + 0.25 * values.mean(1), atol=6e-4)
    assert_allclose(own_std, 0.25 * values.std(1), atol=6e-4)


def test_one_channel_alone_and_what_is_no_number_are_far_off() -> None:
    images = batches(mean=0.0, std=1.0)
    images[3][:, 1] += 50
    assert hint_of(images) is not None
    images[3][0, 0, 0, 0] = np.nan
    assert "nan" in str(hint_of(images))


def test_before_the_first_batches_are_seen_nothing_is_said_and_later_ones_do_not_count() -> None:
    assert hint_of(batches(mean=9.0, std=1.0, count=FIRST_BATCHES - 1)) is None
    later = batches(mean=99.0, std=1.0)
    assert hint_of([*batches(mean=0.0, std=1.0), *later]) is None


def test_normalize_is_the_formula() -> None:
    images_BCHW = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8).to(memory_format=torch.channels_last)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    normalized = Normalize(mean=mean, std=std, device=torch.device("cpu"), dtype=torch.float32)(images_BCHW)
    for c in range(3):
        expected = (images_BCHW[:, c].double() / 255 - mean[c]) / std[c]
        assert torch.allclose(normalized[:, c].double(), expected, atol=1e-6)
    assert normalized.is_contiguous(memory_format=torch.channels_last)
