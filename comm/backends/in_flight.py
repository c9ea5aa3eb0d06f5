"""Operations in flight during backward: a thread for host tensors, a stream for GPU tensors."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from bigbatch.comm.backends.base import CommError, InFlight

Explain = Callable[[str, float, Exception], CommError]
"""(label, seconds waited, cause) -> the error to raise."""


class ThreadQueue:
    """Runs operations one after another on a thread of its own (host tensors; collectives that block)."""

    def __init__(self, explain: Explain) -> None:
        self._explain = explain
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bigbatch-comm")

    def submit(self, operation: Callable[[], None], *, label: str) -> InFlight:
        """Queue the operation; its failure is raised by wait()."""
        return _ThreadWork(self._pool.submit(self._run, operation, label))

    def _run(self, operation: Callable[[], None], label: str) -> None:
        start = time.monotonic()
        try:
            operation()
        except Exception as error:
            raise self._explain(label, time.monotonic() - start, error) from error

    def close(self) -> None:
        """Stop the thread; what was not started is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class _ThreadWork:
    def __init__(self, future: "Future[None]") -> None:
        self._future = future

    def wait(self) -> None:
        self._future.result()


class StreamQueue:
    """Enqueues operations on a CUDA stream of its own, so that they run beside backward's kernels."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def submit(self, operation: Callable[[], None], *, label: str) -> InFlight:
        """Enqueue behind what the calling thread's current stream has produced so far."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.profiler.record_function(label):
            operation()
            event = torch.cuda.Event()
            event.record()
        return _StreamWork(event)

    def close(self) -> None:
        """Wait for what is in flight."""
        self._stream.synchronize()


class _StreamWork:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
