"""Operations in flight: on a thread for host tensors, on a stream for GPU tensors."""

import threading
import time
from functools import partial

import pytest
import torch
from error_texts import naming

from bigbatch.comm.backends import in_flight
from bigbatch.comm.backends.in_flight import StreamQueue, ThreadQueue
from bigbatch.errors import CommError, PeerLostError


def explain(label: str, seconds: float, error: Exception) -> PeerLostError:
    """As a control would, without a roll call."""
    return PeerLostError(f"{label}: {error}")


def be_patient(label: str, seconds: float) -> None:
    """Wait as long as it takes."""


def assert_true(value: bool) -> None:
    """An assertion as an operation."""
    assert value


def test_queue_runs_in_order_beside_its_caller() -> None:
    queue = ThreadQueue(explain, while_waiting=be_patient)
    gate, done = threading.Event(), list[int]()
    queue.submit(lambda: assert_true(gate.wait(timeout=10)), label="first")
    works = [queue.submit(partial(done.append, i), label="later") for i in range(5)]
    assert done == []
    gate.set()
    works[-1].wait()
    assert done == [0, 1, 2, 3, 4]
    queue.close()
    with pytest.raises(CommError, match=naming("buffer 0", "closed")):
        queue.submit(lambda: None, label="buffer 0")


def test_queue_tells_others_the_operation_that_runs() -> None:
    queue = ThreadQueue(explain, while_waiting=be_patient)
    assert queue.oldest() is None
    running, gate = threading.Event(), threading.Event()

    def run() -> None:
        running.set()
        assert_true(gate.wait(timeout=10))

    work, behind = queue.submit(run, label="buffer 0", ranks=(0, 2)), queue.submit(lambda: None, label="buffer 1")
    assert running.wait(timeout=10)
    pending = queue.oldest()
    assert pending is not None
    assert (pending.number, pending.label, pending.ranks) == (1, "buffer 0", (0, 2))
    assert 0 <= time.monotonic() - pending.since < 10
    gate.set()
    for each in (work, behind):
        each.wait()
    queue.close()
    assert queue.oldest() is None


def test_queue_tries_nothing_more_after_a_failure() -> None:
    queue = ThreadQueue(explain, while_waiting=be_patient)
    done: list[str] = []

    def fail() -> None:
        raise OSError("connection closed")

    works = [queue.submit(fail, label="buffer 0"), queue.submit(lambda: done.append("ran"), label="buffer 1")]
    for work in works:
        with pytest.raises(PeerLostError, match="buffer 0: connection closed"):
            work.wait()
    assert done == []
    queue.close()


def test_queue_lets_a_wait_be_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "POLL_SECONDS", 0.01)
    gate = threading.Event()

    def give_up(label: str, seconds: float) -> None:
        if seconds > 0.05:
            raise PeerLostError(f"{label} given up")

    queue = ThreadQueue(explain, while_waiting=give_up)
    start = time.monotonic()
    with pytest.raises(PeerLostError, match="buffer 0 given up"):
        queue.submit(lambda: assert_true(gate.wait(timeout=10)), label="buffer 0").wait()
    assert time.monotonic() - start < 5
    assert queue._thread.daemon  # so that a process with a hanging collective can end
    gate.set()
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
