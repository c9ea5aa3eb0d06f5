"""Time that an update waits for communication."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor


class ExposedTime:
    """Counts the seconds that the update waited for communication: what backward did not hide.

    On a GPU the wait is on the device, so it is timed by events and read only when asked for.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._events: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    def measure(self, buffers: list[Tensor]) -> AbstractContextManager[None]:
        """Time a block that waits for these buffers."""
        return self._on_gpu(buffers[0].device) if buffers and buffers[0].is_cuda else self._on_host()

    @contextmanager
    def _on_host(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start

    @contextmanager
    def _on_gpu(self, device: torch.device) -> Iterator[None]:
        if torch.cuda.is_current_stream_capturing():  # a replay records no times
            yield
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(torch.cuda.current_stream(device))
        yield
        end.record(torch.cuda.current_stream(device))
        self.add_events(begin, end)

    def add_events(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        """Add the device time between two events after both have completed."""
        self._events.append((start, end))
        # folded when complete: a run that never calls take_seconds() would keep a pair of events per step
        while self._events and self._events[0][1].query():
            self._fold(*self._events.popleft())

    def take_seconds(self) -> float:
        """Return the seconds since the last call. Waits for the device on a GPU: call it only when reporting."""
        while self._events:
            self._events[0][1].synchronize()
            self._fold(*self._events.popleft())
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def _fold(self, start: torch.cuda.Event, end: torch.cuda.Event) -> None:
        self._seconds += start.elapsed_time(end) / 1e3
