"""Whether the model's input is normalised: what the first batches of a run show, and what they should state."""

from collections.abc import Sequence

import torch
from torch import Tensor

FIRST_BATCHES = 8
"""Microbatches that are looked at."""
FARTHEST_MEAN = 1.0
STD_RANGE = (0.5, 2.0)
"""Of a channel, beyond which its input is far from mean 0 and standard deviation 1: dark or bright pictures stay
within, bytes and shares of 1 that nobody normalised do not."""


class InputStatistics:
    """Adds up the first batches by channel, on their device, without a host sync; costs nothing after them."""

    def __init__(self) -> None:
        self._left = FIRST_BATCHES
        self._sums_3C: Tensor | None = None
        """Of values, of their squares, and how many."""

    def add(self, images_BCHW: Tensor) -> None:
        """Count a normalised microbatch, as long as it is one of the first."""
        if not self._left:
            return
        self._left -= 1
        # by reductions that read the pictures as they are: a copy in fp64 would be the largest tensor of a run
        others = [dim for dim in range(images_BCHW.dim()) if dim != 1]  # features of a vector are its channels
        sum_C = images_BCHW.sum(others, dtype=torch.float32)
        norm_C = torch.linalg.vector_norm(images_BCHW, dim=others, dtype=torch.float32)
        count_C = torch.full_like(sum_C, images_BCHW[:, 0].numel())
        sums_3C = torch.stack([sum_C, norm_C.square(), count_C]).double()
        self._sums_3C = sums_3C if self._sums_3C is None else self._sums_3C + sums_3C

    def hint(self, *, mean: Sequence[float], std: Sequence[float]) -> str | None:
        """Say, once, where they are far from normalised, and what to state. mean, std: what they were normalised by.

        Waits for the device; None as long as not all of the first batches were seen.
        """
        if self._left or self._sums_3C is None:
            return None
        sums, squares, counts = self._sums_3C.tolist()
        self._sums_3C = None
        means = [total / count for total, count in zip(sums, counts, strict=True)]
        stds = [
            max(0.0, square / count - each**2) ** 0.5
            for square, count, each in zip(squares, counts, means, strict=True)
        ]
        low, high = STD_RANGE
        # not "<": what is not a number is far off, too
        if all(abs(each) <= FARTHEST_MEAN for each in means) and all(low <= each <= high for each in stds):
            return None
        own_mean = [each * scale + shift for each, scale, shift in zip(means, std, mean, strict=True)]
        own_std = [each * scale for each, scale in zip(stds, std, strict=True)]
        return (
            f"the model's input is far from normalised: by channel its mean is {_shown(means)} and its standard "
            f"deviation {_shown(stds)} in the first {FIRST_BATCHES} microbatches, not 0 and 1; of these pictures they "
            f"are --data.mean '[{_shown(own_mean)}]' --data.std '[{_shown(own_std)}]'"
        )


def _shown(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)
