"""Loaders of images for tests, which close behind themselves."""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from bigbatch.trainer.config.sections import DataConfig
from bigbatch.trainer.input.base import Batch, Crop, ImageSource, LoaderSetup
from bigbatch.trainer.input.loaders.encoded import ImageLoader, make_image_loader
from bigbatch.trainer.input.loaders.resident import ResidentLoader

COMMON_SETTINGS: dict[str, Any] = {
    "microbatch_size": 4,
    "num_threads": 2,
    "prefetch_batches": 2,
    "patience_seconds": 0.0,
}
"""All that a loader needs but crop and image_size."""


def bigbatch_threads() -> set[threading.Thread]:
    """Those alive; a test of another file may have left some, so look at the difference."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("bigbatch")}


@contextmanager
def made_loaders(
    name: str, settings: dict[str, Any], *, slack_seconds: float = 0.0
) -> Iterator[Callable[..., ImageLoader]]:
    """A maker of loaders (source, **changed settings) that closes them and checks that no thread stays behind.

    slack_seconds: so long threads that were given up may take to end.
    """
    if name == "dali":
        pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
    made, before = [], bigbatch_threads()

    def make(source: Any, **changed: Any) -> ImageLoader:
        made.append(make_image_loader(name, source, **(settings | changed)))
        return made[-1]

    yield make
    for loader in made:
        loader.close()
        loader.close()
    deadline = time.monotonic() + slack_seconds
    while bigbatch_threads() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not bigbatch_threads() - before


def resident(
    source: ImageSource, *, crop: Crop, image_size: int, microbatch_size: int, device: str = "cpu", **data: Any
) -> ResidentLoader:
    """A resident loader; data: keys of a config's section."""
    return ResidentLoader(
        LoaderSetup(
            source=source,
            crop=crop,
            image_size=lambda epoch: image_size,
            microbatch_size=microbatch_size,
            device=torch.device(device),
            data=DataConfig(loader="resident", image_size=image_size, **data),
        )
    )


def assert_same_batches(ours: Iterable[Batch], theirs: Iterable[Batch], *, num_batches: int) -> None:
    """Bit by bit, and in the same memory format."""
    count = 0
    for batch, expected in zip(ours, theirs, strict=True):
        assert torch.equal(batch.images_BCHW, expected.images_BCHW)
        assert batch.images_BCHW.stride() == expected.images_BCHW.stride()
        assert torch.equal(batch.labels_B, expected.labels_B)
        assert torch.equal(batch.valid_B, expected.valid_B)
        count += 1
    assert count == num_batches


def shard_descriptors(root: Path) -> dict[int, str]:
    """Those of shards below root that this process holds open, with their paths, as the kernel knows them."""
    if not Path("/proc/self/fd").is_dir():
        pytest.skip("needs /proc")
    found = {}
    for entry in os.scandir("/proc/self/fd"):
        try:
            found[int(entry.name)] = os.readlink(entry.path)
        except FileNotFoundError:  # the scan's own
            continue
    return {number: link for number, link in found.items() if link.startswith(str(root)) and ".tar" in link}


def open_shards(root: Path) -> set[str]:
    """The shards below root that this process holds open."""
    return set(shard_descriptors(root).values())
