"""Trace of each buffer and of backward, for Perfetto and chrome://tracing."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from bigbatch.comm.rendezvous.control import Control

MAX_TRACED_RANKS = 64
"""A trace of more ranks is too long to look at."""


class Recorded(Protocol):
    """Records its operations while it has a timeline; see Transport."""

    device: torch.device
    timeline: "Timeline | None"


class Timeline:
    """Records events of one rank: spans and marks, on a separate row for each kind.

    Times of host work are the host's clock (time.time_ns), so the rows of several hosts align as well as their clocks.
    Spans on a GPU are taken from CUDA events on the calling thread's stream, read when the events are asked for.
    Thread-safe for appending the host's events.
    Source: the Chrome trace event format.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[dict[str, Any]] = []
        self._on_gpu: list[tuple[str, str, dict[str, Any], torch.cuda.Event, torch.cuda.Event]] = []
        self._base: tuple[float, torch.cuda.Event] | None = None
        self._lock = threading.Lock()

    def mark(self, name: str, *, row: str = "gradients ready") -> None:
        self._add({"name": name, "ph": "i", "s": "t", "ts": _now_us(), "tid": row})

    @contextmanager
    def span(self, name: str, *, row: str, on_host: bool = False, **facts: Any) -> Iterator[None]:
        """Record the block; on a GPU, what it enqueues on the current stream, unless it is the host's work."""
        if self._device.type != "cuda" or on_host:
            start_us = _now_us()
            yield
            self.add_span(name, row=row, start_us=start_us, end_us=_now_us(), **facts)
        else:
            stream = torch.cuda.current_stream(self._device)
            if self._base is None:
                base = torch.cuda.Event(enable_timing=True)
                # once per recording, so that device times can be put on the host's clock
                torch.cuda.synchronize(self._device)
                base.record(stream)
                self._base = _now_us(), base
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            yield
            end.record(torch.cuda.current_stream(self._device))
            self._on_gpu.append((name, row, facts, start, end))

    def of_sum(self, operation: Callable[[], None], label: str, *, on_host: bool, **facts: Any) -> Callable[[], None]:
        """Mark that a sum's buffer is ready; return its operation with a span."""
        self.mark(label, row="buffers ready")
        return self.span(label, row="all-reduce", on_host=on_host, **facts)(operation)

    def add_span(self, name: str, *, row: str, start_us: float, end_us: float, **facts: Any) -> None:
        """Add a span that is known already; microseconds of the host's clock."""
        self._add({"name": name, "ph": "X", "ts": start_us, "dur": end_us - start_us, "tid": row, "args": facts})

    def _add(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._events.append(event)

    def take(self, *, rank: int, host: str) -> str:
        """Return all events so far as JSON, one per line, and start again. Waits for the device on a GPU."""
        for name, row, facts, start, end in self._on_gpu:
            end.synchronize()
            assert self._base is not None
            base_us, base = self._base
            start_us = base_us + base.elapsed_time(start) * 1e3
            self.add_span(name, row=row, start_us=start_us, end_us=start_us + start.elapsed_time(end) * 1e3, **facts)
        self._on_gpu, self._base = [], None
        with self._lock:
            events, self._events = self._events, []
        # the format needs numbers for rows; their names follow as metadata
        rows = {row: number for number, row in enumerate(dict.fromkeys(str(event["tid"]) for event in events))}
        titles: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "args": {"name": f"rank {rank} on {host}"}}]
        titles += [{"name": "thread_name", "ph": "M", "tid": n, "args": {"name": row}} for row, n in rows.items()]
        numbered = ({**event, "tid": rows[str(event["tid"])]} for event in events)
        return "\n".join(json.dumps({**event, "pid": rank}) for event in (*titles, *numbered))

    def gather(self, control: Control) -> str:
        """Take the events of the first ranks' timelines; return one trace of them on rank 0. Collective."""
        mine = self.take(rank=control.rank, host=control.host)
        texts = control.collect_text(mine if control.rank < MAX_TRACED_RANKS else "", what="collection of traces")
        return merge(texts)


@contextmanager
def recording(transport: Recorded) -> Iterator[Timeline]:
    """Record the operations of this rank in the context; gather() of the timeline returns the trace of all ranks."""
    transport.timeline = timeline = Timeline(transport.device)
    try:
        yield timeline
    finally:
        transport.timeline = None


def merge(texts: list[str]) -> str:
    """Merge the events of several ranks, each from take(), as one trace for ui.perfetto.dev or chrome://tracing."""
    lines = [line for text in texts for line in text.splitlines()]
    return '{"displayTimeUnit": "ms", "traceEvents": [\n' + ",\n".join(lines) + "\n]}\n"


def _now_us() -> float:
    return time.time_ns() / 1e3
