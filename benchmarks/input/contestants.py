"""Contestants of decode.py: our loaders, others' ways, and a limit."""

import io
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from PIL import Image

from bigbatch.errors import ConfigError
from bigbatch.trainer.augment.crops import random_resized_crop
from bigbatch.trainer.datasets.pack import shrink
from bigbatch.trainer.input.base import Loader, Request
from bigbatch.trainer.input.loaders.encoded import make_image_loader, resize_into
from bigbatch.trainer.input.order import ImageIndex

OURS = ("our_dali", "our_pillow")

Draw = Callable[[int], Iterator[Any]]
"""Takes a round, returns batches; exhausting them leaves nothing in flight."""


@dataclass(frozen=True)
class Work:
    """Work of each contestant."""

    index: ImageIndex
    image_size: int
    batch: int
    threads: int
    batches_per_thread: int
    prefetch_batches: int = 2
    """Batches prepared ahead of use, by contestants that have a choice."""
    device_id: int | None = None
    """GPU on which DALI decodes."""

    # A pool of workers hands over whole batches in bursts of one per worker, so that all counts are multiples of them.

    @property
    def fill_batches(self) -> int:
        """Return the number of batches drawn before the clock starts."""
        return 2 * self.prefetch_batches * self.threads

    @property
    def batches(self) -> int:
        """Return the number of timed batches."""
        return self.batches_per_thread * self.threads

    @property
    def total_batches(self) -> int:
        """Return the number of all batches; those after the timed ones keep the pipeline full while the clock runs."""
        return self.fill_batches + self.batches + 2 * self.prefetch_batches * self.threads

    def synchronize(self) -> None:
        """Wait for the GPU's work."""
        if self.device_id is not None:
            torch.cuda.synchronize(self.device_id)


@dataclass(frozen=True)
class Contestant:
    """Does the work in one way."""

    draw: Draw
    work: Work


def make_contestants(work: Work, *, names: Sequence[str]) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Return the contestants that can run here, and why others cannot."""
    contestants, left_out = {}, {}
    for name in names:
        # a limit has one thread, however many the others have
        own = replace(work, threads=1) if name.startswith("limit_") else work
        try:
            contestants[name] = Contestant(MAKERS[name](own), own)
        except (ImportError, ConfigError) as error:
            left_out[name] = str(error)
    return contestants, left_out


def random_positions(work: Work, number: int) -> Iterator[np.ndarray]:
    """Draw positions; images repeat in a small folder, with another box each time."""
    generator = np.random.default_rng(number)
    for _ in range(work.total_batches):
        yield generator.integers(len(work.index), size=work.batch)


def our_dali(work: Work) -> Draw:
    """Run data.loader=dali."""
    return _ours(work, make_image_loader("dali", **_our_settings(work), device_id=work.device_id))


def our_dali_at_256(work: Work) -> Draw:
    """Run data.loader=dali on images that are stored as by `bigbatch data pack --short-side 256 --quality 90`."""
    folder = TemporaryDirectory(prefix="at-256-")
    paths = [f"{position}.jpg" for position in range(len(work.index))]
    for position, path in enumerate(paths):
        Path(folder.name, path).write_bytes(_at_256(work.index, position))
    draw = our_dali(replace(work, index=replace(work.index, root=folder.name, paths=paths)))
    weakref.finalize(draw, folder.cleanup)
    return draw


def _at_256(index: ImageIndex, position: int) -> bytes:
    return shrink(index.read(position), path=index.name(position), max_side=256, quality=90)


def limit_yuv_at_256(work: Work) -> Draw:
    """Crop and resize luma, and chroma at half the size, from planes in memory in one thread; a GPU would make RGB."""
    images, sizes_N2 = [], np.empty((len(work.index), 2), np.int64)
    for position in range(len(work.index)):
        image = Image.open(io.BytesIO(_at_256(work.index, position))).convert("YCbCr")
        half = np.asarray(image.resize(((image.width + 1) // 2, (image.height + 1) // 2), Image.Resampling.BOX))
        images.append((np.asarray(image)[:, :, :1].copy(), half[:, :, 1:].copy()))
        sizes_N2[position] = image.height, image.width
    crop, side = random_resized_crop(seed=0), work.image_size

    def draw(number: int) -> Iterator[Any]:
        for positions_B in random_positions(work, number):
            luma_BHW1 = np.empty((work.batch, side, side, 1), np.uint8)
            chroma_BHW2 = np.empty((work.batch, side // 2, side // 2, 2), np.uint8)
            boxes_B4, flips_B = crop(number, positions_B, sizes_N2[positions_B])
            for row, position in enumerate(positions_B.tolist()):
                (luma, chroma), turn = images[position], 1 + int(flips_B[row])
                top, left, height, width = boxes_B4[row].tolist()
                resize_into(luma_BHW1[row], luma[top : top + height, left : left + width], turn=turn)
                half = chroma[top // 2 : -(-(top + height) // 2), left // 2 : -(-(left + width) // 2)]
                resize_into(chroma_BHW2[row], half, turn=turn)
            yield luma_BHW1, chroma_BHW2

    return draw


def our_pillow(work: Work) -> Draw:
    """Run data.loader=torchvision."""
    return _ours(work, make_image_loader("torchvision", **_our_settings(work)))


def _our_settings(work: Work) -> dict[str, Any]:
    return {
        "source": work.index,
        "crop": random_resized_crop(seed=0),
        "image_size": work.image_size,
        "microbatch_size": work.batch,
        "num_threads": work.threads,
        "prefetch_batches": work.prefetch_batches,
    }


def _ours(work: Work, loader: Loader) -> Draw:
    def draw(number: int) -> Iterator[Any]:
        valid_B = np.ones(work.batch, bool)
        return loader.load(Request(number, positions_B, valid_B) for positions_B in random_positions(work, number))

    return draw


def bare_dali(work: Work) -> Draw:
    """Run the pipeline of DALI's own documentation, without labels to torch: its reader, its random crop."""
    from nvidia.dali import Pipeline, fn, types

    pipeline = Pipeline(
        batch_size=work.batch,
        num_threads=work.threads,
        device_id=work.device_id,
        prefetch_queue_depth=work.prefetch_batches,
        exec_dynamic=True,
    )
    paths = [work.index.name(position) for position in range(len(work.index))]
    with pipeline:
        files, labels = fn.readers.file(
            files=paths,
            labels=work.index.labels_N.tolist(),
            random_shuffle=True,
            initial_fill=len(paths),
            name="reader",
        )
        images = fn.decoders.image_random_crop(
            files,
            device="cpu" if work.device_id is None else "mixed",
            output_type=types.RGB,
            random_area=[0.08, 1.0],
        )
        images = fn.resize(images, size=[work.image_size] * 2, interp_type=types.INTERP_TRIANGULAR)
        pipeline.set_outputs(fn.flip(images, horizontal=fn.random.coin_flip()), labels)
    pipeline.build()

    def draw(number: int) -> Iterator[Any]:
        start = time.perf_counter()
        for _ in range(work.total_batches):
            yield pipeline.run()
        # its reader never ends and works ahead: wait until that many batches must be ready
        time.sleep(2 * work.prefetch_batches * (time.perf_counter() - start) / work.total_batches)

    return draw


def torchvision_recipe(work: Work) -> Draw:
    """Run the reference recipe: ImageFolder, Pillow, worker processes."""
    from torch.utils.data import DataLoader, RandomSampler
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    steps = [
        transforms.RandomResizedCrop(work.image_size),
        transforms.RandomHorizontalFlip(),
        transforms.PILToTensor(),
    ]
    images = ImageFolder(work.index.root, transforms.Compose(steps))
    # it listed the whole split
    images.samples = [(work.index.name(i), label) for i, label in enumerate(work.index.labels_N.tolist())]
    batches = DataLoader(
        images,
        batch_size=work.batch,
        sampler=RandomSampler(images, replacement=True, num_samples=work.total_batches * work.batch),
        num_workers=work.threads,
        prefetch_factor=work.prefetch_batches,
        persistent_workers=True,
        # to fork beside DALI's threads is unsafe
        multiprocessing_context="spawn",
    )
    return lambda number: iter(batches)


def bare_decoder(work: Work) -> Draw:
    """Decode whole images from memory with Pillow's libjpeg-turbo in one thread: no crop, no resize."""

    def draw(number: int) -> Iterator[Any]:
        batches = list(random_positions(work, number))
        encoded = {int(position): work.index.read(int(position)) for position in np.unique(np.concatenate(batches))}
        for positions_B in batches:
            for position in positions_B.tolist():
                Image.open(io.BytesIO(encoded[position])).load()
            yield None

    return draw


MAKERS: dict[str, Callable[[Work], Draw]] = {
    "our_dali": our_dali,
    "our_dali_at_256": our_dali_at_256,
    "our_pillow": our_pillow,
    "bare_dali": bare_dali,
    "torchvision": torchvision_recipe,
    "limit_pillow_whole_picture": bare_decoder,
    "limit_yuv_at_256": limit_yuv_at_256,
}
