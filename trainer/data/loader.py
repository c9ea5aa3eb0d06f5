"""What flows from the input to the loop: requests go in, batches come out."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Request:
    """One microbatch to fetch: a pure function of (seed, epoch, step, rank, world size).

    epoch feeds the random draws; indices_B (int64) are positions in the split; valid_B (bool) is False
    where a sample only pads the batch to its fixed size and must not be counted.
    """

    epoch: int
    indices_B: np.ndarray
    valid_B: np.ndarray


@dataclass(frozen=True)
class Batch:
    """Pictures as uint8 in channels-last memory (shape B, 3, H, W), class indices (int64), validity (bool).

    The tensors belong to the caller until the next batch is drawn from the loader's iterator.
    """

    images_BCHW: Tensor
    labels_B: Tensor
    valid_B: Tensor


Crop = Callable[[int, np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]
"""(epoch, indices_B, sizes_B2) -> (boxes_B4 int32, flips_B bool).

sizes are (height, width) in pixels of the stored picture, EXIF orientation ignored; boxes are
(top, left, height, width) inside it. Every draw depends on (seed, epoch, index) alone."""


class Loader(Protocol):
    """Turns requests into batches, in order, working ahead of the consumer."""

    def load(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield one batch per request, in the order of the requests; may end the iterator of an earlier load.

        Raises: DataError naming the path.
        """
        ...

    def close(self) -> None:
        """Stop background work; safe to call twice, and with an iterator half consumed."""
        ...
