"""Operations in flight: on a thread for host tensors, on a stream for GPU tensors."""

import threading
from collections import deque
from functools import partial
from typing import Any

import pytest
import torch
from error_texts import naming
from played_gpus import PlayedEvent, PlayedGpus

from bigbatch.awake import awake_seconds
from bigbatch.comm.backends import in_flight
from bigbatch.comm.backends.in_flight import LateError, StreamQueue, ThreadQueue
from bigbatch.errors import CommError, PeerLostError


def explain(label: str, seconds: float, error: Exception) -> PeerLostError:
    return PeerLostError(f"{label}: {error}")


def be_patient(label: str, seconds: float) -> None:
    """Wait as long as it takes."""


class Held:
    """An operation that runs until it is let go."""

    def __init__(self) -> None:
        self.is_running, self._gate = threading.Event(), threading.Event()
        self.let_go = self._gate.set

    def __call__(self) -> None:
        self.is_running.set()
        assert self._gate.wait(timeout=200)

    def runs(self) -> bool:
        return self.is_running.wait(timeout=200)


@pytest.fixture
def queue() -> ThreadQueue:
    return ThreadQueue(explain, while_waiting=be_patient)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> StreamQueue:
    """The queue of a GPU that is played."""
    PlayedGpus(1, monkeypatch=monkeypatch)
    return StreamQueue(torch.device("cuda", 0))


def test_queue_runs_in_order_beside_its_caller(queue: ThreadQueue) -> None:
    held, done = Held(), list[int]()
    queue.submit(held, label="first")
    works = [queue.submit(partial(done.append, i), label="later") for i in range(5)]
    assert done == []
    held.let_go()
    works[-1].wait()
    assert done == [0, 1, 2, 3, 4]
    queue.close()
    with pytest.raises(CommError, match=naming("buffer 0", "closed")):
        queue.submit(lambda: None, label="buffer 0")


def test_queue_tells_others_the_operation_that_runs(queue: ThreadQueue) -> None:
    assert queue.oldest() is None
    before, held = awake_seconds(), Held()
    work, behind = queue.submit(held, label="buffer 0", ranks=(0, 2)), queue.submit(lambda: None, label="buffer 1")
    assert held.runs()
    pending = queue.oldest()
    assert pending is not None
    assert (pending.number, pending.label, pending.ranks) == (1, "buffer 0", (0, 2))
    assert before <= pending.since <= awake_seconds()
    held.let_go()
    for each in (work, behind):
        each.wait()
    queue.close()
    assert queue.oldest() is None


def test_queue_tells_of_an_operation_until_it_has_ended_also_between_two(queue: ThreadQueue) -> None:
    """A process that ends leaves no thread in a library: that would abort it."""
    held, seen = Held(), list[str]()
    queue.submit(held, label="buffer 0")
    behind = queue.submit(lambda: None, label="buffer 1")
    assert held.runs()
    jobs = queue._jobs

    class Between:
        put = jobs.put

        def get(self) -> Any:
            seen.append(getattr(queue.oldest(), "label", "nothing"))
            return jobs.get()

    queue._jobs = Between()  # type: ignore[assignment]
    held.let_go()
    behind.wait()
    queue.close()
    assert seen == ["buffer 1", "nothing"]


def test_queue_tries_nothing_more_after_a_failure(queue: ThreadQueue) -> None:
    done: list[str] = []

    def fail() -> None:
        raise OSError("connection closed")

    works = [queue.submit(fail, label="buffer 0"), queue.submit(lambda: done.append("ran"), label="buffer 1")]
    for work in works:
        with pytest.raises(PeerLostError, match="buffer 0: connection closed"):
            work.wait()
    assert done == []
    queue.close()


def test_queue_that_is_aborted_waits_a_while_for_what_runs_and_begins_nothing_more(
    queue: ThreadQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "ABORT_SECONDS", 0.01)
    held = Held()
    first, second = queue.submit(held, label="buffer 0"), queue.submit(lambda: None, label="buffer 1")
    assert held.runs()
    queue.give_up(CommError("aborted"), end=lambda: None)
    held.let_go()
    first.wait()
    with pytest.raises(CommError, match="aborted"):
        second.wait()


def test_queue_that_is_given_up_blames_no_rank_for_what_that_ends() -> None:
    explained: list[str] = []

    def told(label: str, seconds: float, error: Exception) -> PeerLostError:
        explained.append(label)
        return explain(label, seconds, error)

    queue, ended = ThreadQueue(told, while_waiting=be_patient), threading.Event()

    def hang() -> None:
        assert ended.wait(timeout=200)
        raise ConnectionError("the links were shut down")

    work = queue.submit(hang, label="a ring")
    queue.give_up(CommError("left behind"), end=ended.set)
    with pytest.raises(CommError, match="left behind"):
        work.wait()
    assert explained == []


def test_wait_of_a_queue_with_a_limit_names_what_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "POLL_SECONDS", 0.01)
    queue, held = ThreadQueue(explain, while_waiting=be_patient, number=7), Held()
    queue.limit_seconds = 0.0
    with pytest.raises(LateError) as late:
        queue.submit(held, label="a ring").wait()
    assert (late.value.pending.number, late.value.pending.label) == (8, "a ring")
    held.let_go()
    queue.limit_seconds = None
    queue.submit(lambda: None, label="a barrier").wait()
    queue.close()


class Interrupted(deque[Any]):
    """Lets another thread look for the oldest operation between the look at the first one and what follows from it."""

    def __init__(self, queue: StreamQueue, operations: Any) -> None:
        super().__init__(operations)
        self._queue = queue

    def __getitem__(self, index: Any) -> Any:
        first = super().__getitem__(index)
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=self._queue.oldest)
            other.start()
            other.join(timeout=0.1)  # it may have to wait for this one
        return first


def test_two_threads_may_take_out_what_a_gpu_has_done(on_gpu: StreamQueue) -> None:
    """Else backward fails with an IndexError when the one that watches looks at the same time."""
    on_gpu.submit(lambda: None, label="buffer 0")
    assert on_gpu._stream.priority == -1  # type: ignore[attr-defined]  # high: it goes before backward's kernels
    on_gpu._enqueued = Interrupted(on_gpu, on_gpu._enqueued)
    on_gpu.submit(lambda: None, label="buffer 1")
    assert on_gpu.oldest() is None


def test_watching_thread_asks_cuda_nothing(on_gpu: StreamQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query by any thread breaks the capture of a graph that another one has begun as torch does by default."""
    on_gpu.submit(lambda: None, label="buffer 0")

    def refuse(event: PlayedEvent) -> bool:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(PlayedEvent, "query", refuse)
    later = awake_seconds() + 60
    monkeypatch.setattr("bigbatch.comm.backends.in_flight.awake_seconds", lambda: later)
    assert on_gpu.oldest() is None


def test_the_oldest_operation_on_a_gpu_is_the_first_that_is_not_done(
    on_gpu: StreamQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert on_gpu.oldest() is None
    with monkeypatch.context() as busy:
        busy.setattr(PlayedEvent, "query", lambda event: False)
        busy.setattr(torch.Tensor, "copy_", lambda tensor, *_, **__: tensor)  # the GPU has not come to it
        on_gpu.submit(lambda: None, label="buffer 0", ranks=(0, 2))
        on_gpu.submit(lambda: None, label="buffer 1")
        pending = on_gpu.oldest()
        assert pending is not None
        assert (pending.number, pending.label, pending.ranks) == (1, "buffer 0", (0, 2))
    on_gpu.submit(lambda: None, label="buffer 2")
    assert on_gpu.oldest() is None


def test_wait_names_the_operation_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that is queued behind it."""
    monkeypatch.setattr(in_flight, "POLL_SECONDS", 0.01)
    held = Held()

    def give_up(label: str, seconds: float) -> None:
        raise PeerLostError(f"{label} given up")

    queue = ThreadQueue(explain, while_waiting=give_up)
    queue.submit(held, label="buffer 0")
    assert held.runs()
    with pytest.raises(PeerLostError, match="buffer 0 given up"):
        queue.submit(lambda: None, label="buffer 1").wait()
    assert queue._thread.daemon  # a process with a hanging collective can end
    held.let_go()
    queue.close()


@pytest.mark.gpu
def test_stream_runs_behind_its_callers_kernels() -> None:
    device = torch.device("cuda", 0)
    queue = StreamQueue(device)
    tensor_N = torch.zeros(1 << 24, device=device)
    for _ in range(50):
        tensor_N.add_(1)

    def double_() -> None:
        tensor_N.mul_(2)

    queue.submit(double_, label="double").wait()
    tensor_N.add_(1)
    assert float(tensor_N.min()) == float(tensor_N.max()) == 101.0
    queue.close()
