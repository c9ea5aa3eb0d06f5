"""Draw random crops and flips without hidden state: a draw is a hash of (seed, stream, epoch, index, number)."""

import math

import numpy as np

from bigbatch.trainer.input.base import Crop

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(words: np.ndarray) -> np.ndarray:
    """Finish a hash as splitmix64 does, a bijection of 64-bit words. Source: Steele, Lea and Flood 2014."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _absorb(state: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Return a new state from a state and one more key; a chain of calls hashes all keys."""
    # + 1, as a key of 0 would add nothing
    return _mix(state + (value + np.uint64(1)) * _GOLDEN_GAMMA)


def uniforms(*, seed: int, epoch: int, indices_B: np.ndarray, num_draws: int, stream: int = 0) -> np.ndarray:
    """Draw uniformly in [0, 1), float64 (B, num_draws); a sample's draws do not depend on its batch.

    stream: gives different purposes independent draws for the same sample.
    """
    state = np.zeros(1, np.uint64)
    for key in (seed, stream, epoch):
        state = _absorb(state, np.array([key], np.uint64))
    state_B = _absorb(state, indices_B.astype(np.uint64))
    words_BD = _absorb(state_B[:, None], np.arange(num_draws, dtype=np.uint64))
    # the upper 53 bits, which a float64 holds exactly, so that no draw is rounded up to 1
    return (words_BD >> np.uint64(11)) * 2.0**-53


def _place(draws_B2: np.ndarray, free_B2: np.ndarray) -> np.ndarray:
    """Return top and left, each drawn uniformly from 0..free inclusive."""
    return np.floor(draws_B2 * (free_B2 + 1))


def _boxes(tops_lefts_B2: np.ndarray, extents_B2: np.ndarray) -> np.ndarray:
    return np.concatenate([tops_lefts_B2, extents_B2], axis=1).astype(np.int32)


def random_resized_crop(
    *,
    seed: int,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
    attempts: int = 10,
    flip: bool = True,
) -> Crop:
    """Draw boxes of random area (share of the image) and aspect ratio, the first attempt that fits, and flips.

    The distribution of torchvision's RandomResizedCrop, with its fallback to a central crop.
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])

    def crop(epoch: int, indices_B: np.ndarray, sizes_B2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        draws = uniforms(seed=seed, epoch=epoch, indices_B=indices_B, num_draws=2 * attempts + 3)
        areas_BA = draws[:, :attempts] * (scale[1] - scale[0]) + scale[0]
        areas_BA *= sizes_B2.prod(axis=1, keepdims=True)
        aspects_BA = np.exp(draws[:, attempts : 2 * attempts] * (high - low) + low)
        # height and width of every attempt, shape (B, attempts, 2)
        extents_BA2 = np.rint(np.sqrt(np.stack([areas_BA / aspects_BA, areas_BA * aspects_BA], axis=2)))
        fits_BA = np.all((extents_BA2 > 0) & (extents_BA2 <= sizes_B2[:, None, :]), axis=2)
        # the first attempt that fits, or 0 if none does, as fits_B1 tells
        first_B = fits_BA.argmax(axis=1)
        rows_B = np.arange(len(first_B))
        fits_B1 = fits_BA[rows_B, first_B].reshape(-1, 1)
        # else the largest central box with width / height within ratio
        heights_B, widths_B = sizes_B2.T
        central_B2 = np.minimum(sizes_B2, np.rint(np.stack([widths_B / ratio[0], heights_B * ratio[1]], axis=1)))
        extents_B2 = np.where(fits_B1, extents_BA2[rows_B, first_B], central_B2)
        free_B2 = sizes_B2 - extents_B2
        offsets_B2 = np.where(fits_B1, _place(draws[:, -3:-1], free_B2), free_B2 // 2)
        return _boxes(offsets_B2, extents_B2), (draws[:, -1] < 0.5) & flip

    return crop


def center_crop(*, fraction: float = 0.875) -> Crop:
    """Take the central square of fraction * the short side, never flipped.

    Up to rounding equal to torchvision's Resize(size) and CenterCrop(fraction * size), without
    computing the pixels that are cut off. fraction 1.0 of a square image is the whole image.
    """

    def crop(epoch: int, indices_B: np.ndarray, sizes_B2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        sides_B1 = np.maximum(1, np.rint(fraction * sizes_B2.min(axis=1, keepdims=True)))
        extents_B2 = np.repeat(sides_B1, 2, axis=1)
        return _boxes((sizes_B2 - extents_B2) // 2, extents_B2), np.zeros(len(sizes_B2), bool)

    return crop


def padded_crop(*, seed: int, size: int, padding: int = 4, flip: bool = True) -> Crop:
    """Draw a size x size box anywhere in the image padded by `padding` pixels on each side, and flips (CIFAR).

    Coordinates are those of the unpadded image, so top and left may be negative: the loader must pad.
    """

    def crop(epoch: int, indices_B: np.ndarray, sizes_B2: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        draws = uniforms(seed=seed, epoch=epoch, indices_B=indices_B, num_draws=3)
        offsets_B2 = _place(draws[:, :2], sizes_B2 + 2 * padding - size) - padding
        return _boxes(offsets_B2, np.full_like(sizes_B2, size)), (draws[:, 2] < 0.5) & flip

    return crop
