"""Copies between a GPU and the host, and the queues beside them: which GPU they touch, and what they wait for.

The GPUs are played; what they do with the bytes is tests/gpu's affair.
"""

from collections.abc import Callable
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from played_gpus import PlayedGpus

from bigbatch.comm.backends.host_staging import HostStaging
from bigbatch.comm.backends.in_flight import StreamQueue
from bigbatch.comm.gradients.exposed_time import ExposedTime
from bigbatch.comm.timeline import Timeline

THIRD = torch.device("cuda", 2)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> PlayedGpus:
    """Four of them; this thread's is the first, as in a script that has not chosen another."""
    return PlayedGpus(4, monkeypatch=monkeypatch)


def on_a_thread(work: Callable[[], None]) -> None:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = Thread(target=run)
    thread.start()
    thread.join(timeout=200)
    assert not failures


def test_copies_on_a_thread_take_up_no_other_gpu(gpus: PlayedGpus) -> None:
    """Else each rank of a node would have a context on the first one."""
    staging = HostStaging(THIRD)
    host_N, device_N = torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])
    ready = staging.ready()

    def there_and_back() -> None:
        staging.fetch(host_N, device_N, ready=ready)
        staging.copy_back(device_N, host_N.mul_(2))

    on_a_thread(there_and_back)
    assert device_N.tolist() == [2.0, 4.0, 6.0]
    assert gpus.contexts == {2}
    assert gpus.recorded == staging._stream.waited == [gpus.current_stream(THIRD)], "it waits for its own GPU's work"


def test_the_stream_of_a_queue_takes_up_no_other_gpu(gpus: PlayedGpus) -> None:
    queue, used = StreamQueue(THIRD), []
    queue.submit(lambda: used.append(gpus.current_stream(THIRD)), label="buffer 0").wait()
    assert used == gpus.recorded == [queue._stream]
    assert gpus.contexts == {2}
    assert torch.cuda.current_device() == 0


def test_times_of_a_gpu_are_taken_on_it(gpus: PlayedGpus) -> None:
    exposed, timeline = ExposedTime(), Timeline(THIRD)
    buffer_N = SimpleNamespace(is_cuda=True, device=THIRD)
    with exposed.measure([buffer_N]), timeline.span("backward", row="step"):  # type: ignore[list-item]
        pass
    assert exposed.take_seconds() == 1e-3
    assert '"backward"' in timeline.take(rank=0, host="here")
    assert {stream.device for stream in gpus.recorded} == {THIRD}
