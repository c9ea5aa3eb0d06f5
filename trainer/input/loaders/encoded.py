"""A loader of encoded pictures: one part reads, another decodes."""

from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from bigbatch.trainer.input.bad_images import UndecodableError
from bigbatch.trainer.input.base import Batch, Request
from bigbatch.trainer.input.reading import EncodedBatch, EncodedReader
from bigbatch.trainer.input.retry import Draw


def as_batch(encoded: EncodedBatch, images_BHWC: Tensor) -> Batch:
    """Return the batch that answers a request, with its pictures."""
    return Batch(
        images_BCHW=images_BHWC.permute(0, 3, 1, 2),
        labels_B=torch.from_numpy(encoded.labels_B),
        valid_B=torch.from_numpy(encoded.valid_B),
        request=encoded.request,
        replaced=encoded.replaced,
    )


class Decoder(Protocol):
    """Turns encoded batches into batches, in order, working ahead of the consumer."""

    def decode(self, encoded: Generator[EncodedBatch, None, None]) -> Generator[Batch, None, None]:
        """Yield one batch for each; closing it closes encoded. It may end the generator of an earlier call.

        Raises: UndecodableError naming the picture, and what encoded raises.
        """
        ...

    def close(self) -> None:
        """Let go of memory and threads; safe to call twice."""
        ...


class ImageLoader:
    """Reads and decodes ahead; where pictures that cannot be decoded may be skipped, another stands in."""

    def __init__(self, reader: EncodedReader, decoder: Decoder) -> None:
        self.reader = reader
        self.decoder = decoder
        self._stream: Generator[Batch, None, None] | None = None

    def load(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Yield one batch per request, in order; ends the iterator of an earlier load.

        Raises: DataError naming a picture that cannot be read or decoded.
        """
        self.end()
        self._stream = self._batches(iter(requests))
        return self._stream

    def close(self) -> None:
        """Stop background work; a closed loader may be used again."""
        self.end()
        self.decoder.close()
        self.reader.close()

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Leave no trace of what is loaded within: bad pictures that it meets are afterwards as unknown as before."""
        known = dict(self.reader.bad.reasons)
        try:
            yield
        finally:
            self.end()
            self.reader.bad.reasons = known

    def end(self) -> None:
        """End the iterator of the last load, and the work ahead of it."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _batches(self, requests: Iterator[Request]) -> Generator[Batch, None, None]:
        """Read all that was under way again, after a picture that only decoding showed to be bad."""
        under_way: deque[Request] = deque()
        again: deque[Request] = deque()

        def drawn() -> Iterator[Request]:
            while (request := again.popleft() if again else next(requests, None)) is not None:
                under_way.append(request)
                yield request

        draw = Draw()
        while True:
            self.reader.draw = draw
            try:
                with closing(self.decoder.decode(self.reader.read(drawn()))) as batches:
                    try:
                        for batch in batches:
                            under_way.popleft()
                            self.reader.draw = None
                            yield batch
                            self.reader.draw = draw = Draw()
                    finally:
                        self.reader.draw = None
                        self.reader.interrupt()
                return
            except UndecodableError as error:
                self.reader.bad.add(error.position, error)
                # what an earlier stop left for another time comes after what was under way at this one
                again.extendleft(reversed(under_way))
                under_way.clear()
