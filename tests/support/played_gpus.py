"""GPUs that are played on a machine without one: which of them a process takes up, and which stream an event is on.

As CUDA 12 does it: a thread starts with the first GPU as its current one; choosing another, or a stream of another,
makes a context there, which costs each process some 500 MB of that GPU; to leave one by torch.cuda.device makes none.
The context managers are torch's own.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch


class PlayedStream:
    """A stream that records what it must wait for."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device = device
        self.priority = priority
        self.waited: list[Any] = []

    def wait_event(self, event: "PlayedEvent") -> None:
        """Wait on the device for what the event marks."""
        self.waited.append(event.stream)

    def wait_stream(self, stream: "PlayedStream") -> None:
        """Wait on the device for what the stream holds."""
        self.waited.append(stream)

    def synchronize(self) -> None:
        """Wait on the host, for nothing."""


class PlayedEvent:
    """An event; everything is done as soon as it is asked for."""

    def __init__(self, gpus: "PlayedGpus") -> None:
        self._gpus = gpus
        self.stream: PlayedStream | None = None

    def record(self, stream: PlayedStream | None = None) -> None:
        """Mark what the stream holds; without one, the current stream of the current GPU."""
        self.stream = stream or self._gpus.current_stream()
        self._gpus.recorded.append(self.stream)

    def query(self) -> bool:
        """Tell that it is done."""
        return True

    def synchronize(self) -> None:
        """Wait on the host, for nothing."""

    def elapsed_time(self, other: "PlayedEvent") -> float:
        """Return milliseconds. As CUDA, it refuses events of two GPUs."""
        assert self.stream is not None
        assert other.stream is not None
        assert self.stream.device == other.stream.device, "events of two GPUs"
        return 1.0


class PlayedPool:
    """Memory of an allocator's; is_used once tensors were made in it."""

    def __init__(self, allocator: object) -> None:
        self.allocator = allocator
        self.is_used = False


class PlayedGpus:
    """The part of torch.cuda that bigbatch's communication uses, over count GPUs; uuids are theirs."""

    def __init__(self, count: int, *, monkeypatch: pytest.MonkeyPatch, uuids: Sequence[str] = "abcdefgh") -> None:
        self.contexts: set[int] = set()
        """Those that this process has taken up."""
        self.recorded: list[PlayedStream] = []
        """The stream of each event."""
        self._thread = threading.local()
        self._default = [self._make_stream(torch.device("cuda", index)) for index in range(count)]
        self.contexts.clear()  # a default stream is there without
        played = {
            "is_available": lambda: count > 0,
            "device_count": lambda: count,
            "get_device_properties": lambda device: SimpleNamespace(uuid=uuids[torch.device(device).index or 0]),
            "current_device": self._current,
            "set_device": lambda device: self._use(torch.device(device).index),
            "_exchange_device": self._exchange,
            "_maybe_exchange_device": self._exchange_without_context,
            "Stream": self._make_stream,
            "Event": self._make_event,
            "current_stream": self.current_stream,
            "set_stream": self._set_stream,
            "is_current_stream_capturing": lambda: False,
            "MemPool": PlayedPool,
            "use_mem_pool": self._use_pool,
            "synchronize": lambda device=None: None,
        }
        for name, value in played.items():
            monkeypatch.setattr(torch.cuda, name, value)
        self._play_memory(monkeypatch)

    def _play_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch, "zeros", _on_host(torch.zeros))

    def current_stream(self, device: torch.device | None = None) -> Any:
        """Return the stream on which this thread works on a GPU."""
        index = self._current() if device is None else torch.device(device).index
        return getattr(self._thread, "streams", {}).get(index, self._default[index])

    def _current(self) -> int:
        return getattr(self._thread, "device", 0)

    def _use(self, index: int) -> None:
        if index != self._current():
            self._thread.device = index
        self.contexts.add(index)

    def _exchange(self, index: int) -> int:
        before = self._current()
        self._use(index)
        return before

    def _exchange_without_context(self, index: int) -> int:
        before, self._thread.device = self._current(), index
        return before

    @contextmanager
    def _use_pool(self, pool: PlayedPool, device: torch.device) -> Iterator[None]:
        assert device.index == self._current()
        yield
        pool.is_used = True

    def _make_stream(self, device: torch.device, priority: int = 0) -> PlayedStream:
        self.contexts.add(device.index)
        return PlayedStream(device, priority)

    def _make_event(self, *, enable_timing: bool = False) -> PlayedEvent:
        return PlayedEvent(self)

    def _set_stream(self, stream: PlayedStream) -> None:
        if stream.device.index != self._current():
            self._use(stream.device.index)
        self._thread.streams = {**getattr(self._thread, "streams", {}), stream.device.index: stream}


def _on_host(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make in host memory what is asked for on a GPU, or in memory that is locked for one."""

    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = "cpu"
        return make(*args, **{**kwargs, "pin_memory": False})

    return made
