"""DALI on a GPU that is played: fed by a thread, on a stream of its own, ahead of the step."""

import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recorded_gpu import GPU, RecordedGpu
from stream_order import require_every_wait

from bigbatch.errors import StorageError
from bigbatch.trainer.input.base import LoaderSetup, Request
from bigbatch.trainer.input.loaders import dali
from bigbatch.trainer.input.reading import EncodedBatch, prefetch

pytest.importorskip("nvidia.dali", reason="nvidia-dali is not installed")
SIZE, DEPTH = 4, 2


class PlayedPipeline:
    """Imitates DALI's pipeline: it decodes as many batches ahead as its queue holds, on a separate stream.

    The memory of a batch is bound to the stream for which it is asked.
    """

    def __init__(self, gpu: RecordedGpu, feed: Callable[[], Any]) -> None:
        self.feeders: list[str] = []
        self._gpu, self._feed = gpu, feed
        self._own = torch.cuda.Stream(GPU)
        self._queue: list[int] | None = None

    def run(self, stream: torch.cuda.Stream) -> list[Any]:
        for _ in range(DEPTH if self._queue is None else 1):
            self._queue = self._queue or []
            self.feeders.append(threading.current_thread().name)
            try:
                self._queue.append(int(self._feed()[0][0][0]))
            except StopIteration:
                break
        if not self._queue:
            raise StopIteration
        with torch.cuda.stream(stream):
            images_BHWC = torch.empty((1, SIZE, SIZE, 3), dtype=torch.uint8, device=GPU)
        trace, number = self._gpu.trace, self._queue.pop(0)
        trace.follow(self._own.actor, stream.actor)  # type: ignore[attr-defined]
        with torch.cuda.stream(self._own):
            images_BHWC.fill_(number)
        trace.follow(stream.actor, self._own.actor)  # type: ignore[attr-defined]
        return [SimpleNamespace(as_tensor=lambda: images_BHWC)]

    def reset(self) -> None:
        self._queue = None


class Bench:
    """A decoder on the GPU, whose thread is recorded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gpu = RecordedGpu(monkeypatch)
        self.pipelines: list[PlayedPipeline] = []

        def built(feed: Callable[[], Any], _: LoaderSetup) -> PlayedPipeline:
            self.pipelines.append(PlayedPipeline(self.gpu, feed))
            return self.pipelines[-1]

        monkeypatch.setattr(dali, "_build_pipeline", built)
        monkeypatch.setattr(dali, "from_dlpack", lambda tensor: tensor)
        monkeypatch.setattr(dali, "prefetch", self._traced_prefetch)
        setup: Any = SimpleNamespace(device=torch.device("cuda", 0), data=SimpleNamespace(num_threads=1))
        self.decoder = dali.DaliDecoder(setup)

    def _traced_prefetch(self, items: Iterable[Any], *, depth: int) -> Iterator[Any]:
        def recorded() -> Generator[Any, None, None]:
            source, end = iter(items), object()
            try:
                while True:
                    with self.gpu.running():
                        item = next(source, end)
                        if item is end:
                            return
                        marker = self.gpu.trace.mark(self.gpu.thread)
                    yield item, marker
            finally:
                source.close()  # type: ignore[attr-defined]

        stream = prefetch(recorded(), depth=depth)
        try:
            for item, marker in stream:
                self.gpu.trace.wait(self.gpu.thread, [marker])
                yield item
        finally:
            stream.close()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Yield a Bench with the GPU in use by this thread."""
    made = Bench(monkeypatch)
    with made.gpu.running():
        yield made


def encoded(number: int) -> EncodedBatch:
    return EncodedBatch(
        request=Request(0, np.array([number]), np.ones(1, bool)),
        positions=[number],
        images=[bytes([number])],
        names=[f"{number}.jpg"],
        boxes_B4=np.array([[0, 0, 1, 1]], np.int32),
        turns_B=np.ones(1, np.uint8),
        labels_B=np.array([number]),
        valid_B=np.ones(1, bool),
        image_size=SIZE,
        replaced=(),
    )


def read(numbers: Iterable[int]) -> Generator[EncodedBatch, None, None]:
    yield from map(encoded, numbers)


def test_dali_stream_images_are_waited_for_and_their_memory_is_kept(bench: Bench) -> None:
    bench.gpu.trace.judge_from_here()
    found = [int(batch.images_BCHW.sum()) for batch in bench.decoder.decode(read(range(6)))]
    assert found == [number * SIZE * SIZE * 3 for number in range(6)]
    require_every_wait(bench.gpu.trace)


def test_dali_stream_memory_that_the_step_still_reads_is_seen(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.gpu, "keep_for", lambda tensor, stream: None)
    for batch in bench.decoder.decode(read(range(6))):
        batch.images_BCHW.sum()
        del batch
    assert any("an allocation for" in each for each in bench.gpu.trace.objections())


def test_dali_stream_a_thread_feeds_while_the_step_computes(bench: Bench) -> None:
    """The next batch is taken from DALI, and more are fed, before the step asks for it."""
    fed = threading.Event()

    def slow() -> Generator[EncodedBatch, None, None]:
        for number in range(6):
            if number == DEPTH:
                fed.set()
            yield encoded(number)

    batches = bench.decoder.decode(slow())
    next(batches)
    assert fed.wait(200), "a batch beyond DALI's queue is fed while nothing is asked for"
    batches.close()
    (pipeline,) = bench.pipelines
    # the rest is drained by the thread that closes
    assert {name.split("_")[0] for name in pipeline.feeders[: DEPTH + 1]} == {"bigbatch-prefetch"}
    assert len(list(bench.decoder.decode(read(range(3))))) == 3


def test_dali_stream_a_failure_comes_behind_the_batches_before_it(bench: Bench) -> None:
    def failing() -> Generator[EncodedBatch, None, None]:
        yield from map(encoded, range(3))
        raise StorageError("far/away/3.jpg: is gone")

    batches = bench.decoder.decode(failing())
    assert [int(batch.labels_B) for batch in (next(batches) for _ in range(3))] == [0, 1, 2]
    with pytest.raises(StorageError, match=r"3\.jpg"):
        next(batches)
