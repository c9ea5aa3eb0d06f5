"""Check that the data settings fit each other and the rest of the run."""

import math
from collections.abc import Iterator

from bigbatch.trainer.config.sections import CommConfig, DataConfig


def check_loader(data: DataConfig) -> Iterator[str]:
    """Yield an error if crop, sizes or stage do not fit the loader."""
    if (data.loader == "resident") != (data.crop == "padded"):
        yield (
            f"data.crop={data.crop} does not go with data.loader={data.loader}: resident takes padded crops, the "
            "other loaders take resized ones"
        )
    if data.loader == "resident" and data.eval_crop_fraction != 1:
        yield (
            f"data.eval_crop_fraction={data.eval_crop_fraction} does not go with data.loader=resident, which does "
            "not resize: set it to 1.0"
        )
    if data.loader == "resident" and data.train_sizes is not None:
        yield f"data.train_sizes={_plain(data.train_sizes)} has no meaning with data.loader=resident: set it to null"
    if data.stage == "":
        yield "data.stage is empty: name a folder of each node, or set it to null"


def check_patience(data: DataConfig, comm: CommConfig) -> Iterator[str]:
    """Yield an error if twice the patience (input/retry.py) is longer than other ranks wait."""
    patience, timeout = data.patience_seconds, comm.timeout_seconds
    if data.loader == "synthetic" or 2 * (patience + 1) <= timeout:
        return
    longest = math.floor(100 * (timeout / 2 - 1)) / 100
    shorter = f", or data.patience_seconds to at most {longest:g}" if longest > 0 else ""
    yield (
        f"data.patience_seconds={patience:g} is too long: the other ranks give up after comm.timeout_seconds="
        f"{timeout:g}: set that to at least {math.ceil(2 * (patience + 1))}{shorter}"
    )


def check_train_sizes(data: DataConfig, *, epochs: int) -> Iterator[str]:
    """Yield an error if train_sizes do not fit a run of that many epochs."""
    if data.train_sizes is None:
        return
    firsts = [first for first, _ in data.train_sizes]
    if not firsts or firsts[0] != 0 or firsts != sorted(set(firsts)):
        yield f"data.train_sizes={_plain(data.train_sizes)} must give epochs that rise from 0"
        return
    if firsts[-1] >= epochs:
        yield (
            f"data.train_sizes={_plain(data.train_sizes)} changes at epoch {firsts[-1]}, but run.epochs={epochs}: the "
            f"last epoch is {epochs - 1}"
        )
    if min(size for _, size in data.train_sizes) <= 0:
        yield f"data.train_sizes={_plain(data.train_sizes)} must give sizes of 1 pixel or more"


def _plain(pairs: tuple[tuple[int, int], ...]) -> list[list[int]]:
    return [list(pair) for pair in pairs]
