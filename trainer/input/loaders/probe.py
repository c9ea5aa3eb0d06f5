"""Measure the input rate without training: of the whole loader, and of each stage alone."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle

import torch

from bigbatch.errors import DataError
from bigbatch.trainer.input.base import Batch, Loader, Request
from bigbatch.trainer.input.formats import encoded_size
from bigbatch.trainer.input.loaders.encoded import ImageLoader
from bigbatch.trainer.input.prepare_batch import PrepareBatch
from bigbatch.trainer.input.reading import EncodedBatch
from bigbatch.trainer.input.report import Rates

FILL_SHARE = 0.25
"""Largest share of a measurement's time that passes before batches are counted."""
NUM_KEPT = 2
"""Batches that are kept, and decoded repeatedly to measure decoding."""


@dataclass(frozen=True)
class ProbedInput:
    """Rates of this rank, and (height, width) of some stored images if the loader reads any.

    Stage copy is the copy from host to device; stage augment is PrepareBatch's work there: augment, normalise, mix.
    """

    rates: Rates
    sizes: tuple[tuple[int, int], ...]


def probe_input(
    loader: Loader,
    requests: Callable[[], Iterator[Request]],
    *,
    prepare: PrepareBatch,
    seconds: float,
    num_fill: int,
    clock: Callable[[], float] = time.perf_counter,
) -> ProbedInput | None:
    """Measure for about that many seconds; return None on a bad image, which training meets again later.

    requests: returns the run's requests, at least one; they are repeated if too few. num_fill: batches that fill the
    loader's queues. Leaves loader unchanged. Takes longer if batches are slow: each measurement needs at least two.
    """

    def endless() -> Iterator[Request]:
        assert next(requests(), None) is not None, "a run without a step left is not measured"
        while True:
            yield from requests()

    timed = partial(rate, num_fill=num_fill, clock=clock)
    try:
        with loader.trial() if isinstance(loader, ImageLoader) else nullcontext():
            return _probe(loader, endless(), prepare=prepare, seconds=seconds, timed=timed)
    except DataError:
        return None


def rate(
    batches: Iterator[Batch | EncodedBatch], *, seconds: float, num_fill: int, clock: Callable[[], float]
) -> float:
    """Return the images per second of an endless iterator.

    Does not count the first batch, and up to num_fill batches within FILL_SHARE of the seconds: they start threads and
    fill queues. Counts at least one batch, however long it takes.
    """
    start, num_filled, num_images = clock(), 0, 0
    while num_filled == 0 or (num_filled < num_fill and clock() - start < FILL_SHARE * seconds):
        next(batches)
        num_filled += 1
    start = clock()
    while num_images == 0 or clock() - start < (1 - FILL_SHARE) * seconds:
        num_images += len(next(batches).request.indices_B)
    return num_images / (clock() - start)


def _probe(
    loader: Loader, requests: Iterator[Request], *, prepare: PrepareBatch, seconds: float, timed: Callable[..., float]
) -> ProbedInput:
    batches: deque[Batch] = deque(maxlen=NUM_KEPT)

    def kept() -> Iterator[Batch]:
        for batch in _ready(loader.load(requests)):
            batches.append(batch)
            yield batch

    rates: dict[str, float | None] = {"loader": timed(kept(), seconds=0.4 * seconds), "read": None, "decode": None}
    encoded: list[EncodedBatch] = []
    if isinstance(loader, ImageLoader):
        loader.end()
        # continues where the loader stopped: images read before would come from the page cache
        with closing(loader.reader.read(requests)) as fresh:
            rates["read"] = timed(fresh, seconds=0.2 * seconds)
        # the loader has decoded these, or replaced their bad images
        encoded += loader.reader.read([batch.request for batch in batches])
        with closing(loader.decoder.decode(batch for batch in cycle(encoded))) as decoded:
            rates["decode"] = timed(_ready(decoded), seconds=0.2 * seconds)
    last = batches[-1]
    copied = replace(last, images_BCHW=prepare.copy(last))
    copies = (replace(batch, images_BCHW=prepare.copy(batch)) for batch in cycle([last]))
    is_there = last.images_BCHW.device == copied.images_BCHW.device
    rates["copy"] = None if is_there else timed(_ready(copies), seconds=0.1 * seconds)
    augmented = (replace(batch, images_BCHW=prepare(batch).images_BCHW) for batch in cycle([copied]))
    rates["augment"] = timed(_ready(augmented), seconds=0.1 * seconds)
    sizes = [
        encoded_size(data, path=name, max_pixels=sys.maxsize)  # they are decoded already
        for batch in encoded
        for data, name in zip(batch.images, batch.names, strict=True)
    ]
    return ProbedInput(rates, tuple(sizes))


def _ready(batches: Iterable[Batch]) -> Iterator[Batch]:
    """Yield each batch when the current stream has made it; other streams may continue decoding later batches."""
    for batch in batches:
        if batch.images_BCHW.is_cuda:
            torch.cuda.current_stream(batch.images_BCHW.device).synchronize()
        yield batch
