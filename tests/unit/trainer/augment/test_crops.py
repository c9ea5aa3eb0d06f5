"""Draws without state, and crops with the distribution of torchvision's."""

import math

import numpy as np
import pytest
import torch
from torchvision.transforms import RandomResizedCrop

from bigbatch.trainer.augment.crops import center_crop, padded_crop, random_resized_crop, uniforms


def sizes(height, width, count):
    return np.tile(np.array([[height, width]], np.int64), (count, 1))


def splitmix(word):
    """The finaliser in Python integers. Source: Steele, Lea and Flood 2014."""
    mask = 2**64 - 1
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & mask
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & mask
    return word ^ (word >> 31)


def test_uniforms_are_the_chained_hash_of_their_keys():
    word = 0
    for key in (11, 2, 5, 1234567, 3):  # seed, stream, epoch, index, number of the draw
        word = splitmix((word + (key + 1) * 0x9E3779B97F4A7C15) % 2**64)
    drawn = uniforms(seed=11, epoch=5, indices_B=np.array([9, 1234567]), num_draws=4, stream=2)
    assert drawn[1, 3] == (word >> 11) / 2**53


def test_uniforms_are_uniform_and_uncorrelated():
    drawn = uniforms(seed=1, epoch=2, indices_B=np.arange(20000), num_draws=8)
    assert drawn.shape == (20000, 8)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.array([np.histogram(column, bins=64, range=(0, 1))[0] for column in drawn.T])
    chi2_per_column = ((counts - 312.5) ** 2 / 312.5).sum(axis=1)
    assert (np.abs(chi2_per_column - 63) < 5 * math.sqrt(2 * 63)).all()  # mean k, variance 2k
    others = [
        uniforms(seed=seed, epoch=epoch, indices_B=indices, num_draws=8, stream=stream)
        for seed, epoch, indices, stream in (
            (2, 2, np.arange(20000), 0),
            (1, 3, np.arange(20000), 0),
            (1, 2, np.arange(1, 20001), 0),
            (1, 2, np.arange(20000), 1),
        )
    ]
    table = np.concatenate([drawn, *others], axis=1)
    correlations = np.corrcoef(table.T) - np.eye(table.shape[1])
    assert np.abs(correlations).max() < 5 / math.sqrt(20000)


@pytest.mark.parametrize("make", [random_resized_crop, lambda seed: padded_crop(seed=seed, size=32)])
def test_crops_a_box_does_not_depend_on_its_batch(make):
    crop, indices, shapes = make(seed=3), np.arange(60), np.random.default_rng(0).integers(20, 900, (60, 2))
    boxes, flips = crop(4, indices, shapes)
    assert boxes.dtype == np.int32
    assert flips.dtype == bool
    for size in (1, 7, 32):
        order = np.random.default_rng(size).permutation(60)[:size]
        part_boxes, part_flips = crop(4, indices[order], shapes[order])
        np.testing.assert_array_equal(part_boxes, boxes[order])
        np.testing.assert_array_equal(part_flips, flips[order])
    assert (crop(5, indices, shapes)[0] != boxes).any()
    assert (make(seed=4)(4, indices, shapes)[0] != boxes).any()


def distance(ours, theirs):
    """Two-sample Kolmogorov-Smirnov statistic."""
    points = np.sort(np.concatenate([ours, theirs]))
    below = [np.searchsorted(np.sort(sample), points, side="right") / len(sample) for sample in (ours, theirs)]
    return np.abs(below[0] - below[1]).max()


@pytest.mark.parametrize(("height", "width"), [(375, 500), (2000, 90)])
def test_random_resized_crop_boxes_are_distributed_as_torchvision_ones(height, width):
    count = 1500
    torch.manual_seed(0)
    image = torch.empty(1, height, width)
    theirs = np.array([RandomResizedCrop.get_params(image, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(count)])
    ours, flips = random_resized_crop(seed=0)(0, np.arange(count), sizes(height, width, count))
    # chance of a false alarm 1e-6 per comparison, for continuous values; less for these
    bound = math.sqrt(-math.log(1e-6 / 2) / 2) * math.sqrt(2 / count)
    for column in range(4):
        assert distance(ours[:, column], theirs[:, column]) < bound
    assert distance(ours[:, 2] * ours[:, 3], theirs[:, 2] * theirs[:, 3]) < bound
    assert distance(ours[:, 3] / ours[:, 2], theirs[:, 3] / theirs[:, 2]) < bound
    assert abs(flips.mean() - 0.5) < 5 * 0.5 / math.sqrt(count)


def test_random_resized_crop_boxes_lie_inside():
    shapes = np.random.default_rng(1).integers(1, 400, (20000, 2))
    shapes[:1000] = 1
    boxes, _ = random_resized_crop(seed=9)(0, np.arange(20000), shapes)
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] >= 1).all()
    assert (boxes[:, :2] + boxes[:, 2:] <= shapes).all()


def test_random_resized_crop_an_image_that_no_attempt_fits_gets_torchvisions_central_crop():
    shapes = [(10, 4000), (4000, 10), (77, 77)]
    for height, width in shapes:
        # a scale above 1 never fits, so both fall back
        ours, _ = random_resized_crop(seed=0, scale=(9.0, 9.5))(0, np.arange(1), sizes(height, width, 1))
        theirs = RandomResizedCrop.get_params(torch.empty(1, height, width), [9.0, 9.5], [3 / 4, 4 / 3])
        assert ours[0].tolist() == list(theirs)


def test_crops_flips_can_be_switched_off():
    assert not random_resized_crop(seed=0, flip=False)(0, np.arange(50), sizes(99, 99, 50))[1].any()
    assert not padded_crop(seed=0, size=32, flip=False)(0, np.arange(50), sizes(32, 32, 50))[1].any()


def test_center_crop_is_resize_and_center_crop_up_to_rounding():
    shapes = np.random.default_rng(2).integers(30, 2000, (500, 2))
    boxes, flips = center_crop(fraction=224 / 256)(0, np.arange(500), shapes)
    assert not flips.any()
    scales = shapes.min(axis=1) / 256  # stored pixels per pixel of an image with short side 256
    resized = np.floor(shapes / scales[:, None] + 1e-9)
    expected = np.concatenate([np.rint((resized - 224) / 2), np.full((500, 2), 224)], axis=1) * scales[:, None]
    # half a pixel for each rounding: two of theirs in resized pixels, two of ours in stored ones
    assert (np.abs(boxes - expected) <= 1 + scales[:, None]).all()
    assert (boxes[:, 2] == boxes[:, 3]).all()
    assert center_crop(fraction=1.0)(0, np.arange(1), sizes(32, 32, 1))[0].tolist() == [[0, 0, 32, 32]]


def test_padded_crop_reaches_every_offset_equally():
    boxes, flips = padded_crop(seed=0, size=32, padding=4)(0, np.arange(81 * 400), sizes(32, 32, 81 * 400))
    assert (boxes[:, 2:] == 32).all()
    places, counts = np.unique(boxes[:, :2], axis=0, return_counts=True)
    assert places.tolist() == [[top, left] for top in range(-4, 5) for left in range(-4, 5)]
    assert np.abs(counts - 400).max() < 5 * math.sqrt(400)
    assert abs(flips.mean() - 0.5) < 5 * 0.5 / math.sqrt(len(flips))
