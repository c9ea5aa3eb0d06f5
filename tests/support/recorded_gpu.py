"""A GPU that is played on a machine without one, and whose streams are recorded.

Tensors lie in host memory, but some are taken to be on the GPU: those made there, copied there, or computed from such.
They say so when they are asked, so the code under test takes the ways that it takes on a GPU, with the values of a CPU.
What each operator reads and writes, on which stream, goes into a Trace; and so does what waits for what. Copies between
host and GPU, and numbers that the host waits for, are listed.
"""

import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from played_gpus import PlayedEvent, PlayedGpus, PlayedStream
from stream_order import Actor, Marker, Trace
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bigbatch.comm.backends.in_flight import StreamQueue, ThreadQueue
from bigbatch.tools.doctor.profile import INDEXED, WAITING

GPU = torch.device("cuda", 0)
OURS = str(Path(__file__).resolve().parents[2] / "bigbatch")
SHAPE_ALONE = re.compile(r"aten::(new_.*|.*_like)")
"""What these read of a tensor that they are given."""


def place() -> str:
    """Name the two innermost lines of this project, such as 'in_flight.py:162 wait < reducer.py:201 wait'."""
    found, frame = [], sys._getframe(1)
    while frame is not None and len(found) < 2:
        code = frame.f_code
        if code.co_filename.startswith(OURS):
            found.append(f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return " < ".join(found) or "a test"


@dataclass(frozen=True)
class Copy:
    """Bytes that went between host and GPU."""

    way: str
    is_blocking: bool
    place: str


@dataclass(frozen=True)
class _Memory:
    """The memory of tensors; owner is the stream whose next allocation may take it again once it is freed."""

    number: int
    reference: StorageWeakRef
    is_there: bool
    owner: Actor


class RecordedStream(PlayedStream):
    """A stream whose waits go into the trace."""

    def __init__(self, gpu: "RecordedGpu", device: torch.device) -> None:
        super().__init__(device)
        self._gpu, self.actor = gpu, gpu.new_actor()

    def wait_event(self, event: Any) -> None:
        """Wait on the device for what the event marks."""
        self._gpu.trace.wait(self.actor, event.markers, place=place())

    def wait_stream(self, stream: Any) -> None:
        """Wait on the device for what the stream holds."""
        self._gpu.trace.wait(self.actor, [self._gpu.trace.mark(stream.actor)], place=place())

    def synchronize(self) -> None:
        """Wait on the host."""
        self._gpu.trace.wait(self._gpu.thread, [self._gpu.trace.mark(self.actor)], place=place())


class RecordedEvent(PlayedEvent):
    """An event whose records and waits go into the trace."""

    def __init__(self, gpu: "RecordedGpu") -> None:
        super().__init__(gpu)
        self._gpu, self._time = gpu, gpu.new_number()
        self.markers: list[Marker] = []
        """The last one; none before the first record, which CUDA takes for done."""

    def record(self, stream: Any = None) -> None:
        """Mark what the stream holds, and write down when."""
        super().record(stream)
        actor = (stream or self._gpu.current_stream()).actor
        self._gpu.trace.launch(actor, "a time", writes={self._time})
        self.markers = [self._gpu.trace.mark(actor)]

    def query(self) -> bool:
        """Tell that it is not done, which is always possible."""
        return False

    def synchronize(self) -> None:
        """Wait on the host."""
        self._gpu.trace.wait(self._gpu.thread, self.markers, place=place())

    def elapsed_time(self, other: Any) -> float:
        """Read both times on the host."""
        self._gpu.trace.launch(self._gpu.thread, "elapsed_time", reads={self._time, other._time})
        return super().elapsed_time(other)


class RecordedGpu(PlayedGpus):
    """One GPU. Code within running() sees it, and what that gives to a ThreadQueue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.trace = Trace(lambda: self.thread)
        self.copies: list[Copy] = []
        self.local = threading.local()
        self._num_actors = self._num_memories = 0
        self._memories: dict[int, _Memory] = {}
        self._freed: list[_Memory] = []
        self._kept: set[int] = set()
        self._pinned: set[int] = set()
        self._polled: set[int] = set()
        self._captured: _Graph | None = None
        super().__init__(1, monkeypatch=monkeypatch)
        played = {
            "is_current_stream_capturing": lambda: self._captured is not None,
            "CUDAGraph": lambda: _Graph(self),
            "graph": self._capture,
            "graph_pool_handle": lambda: None,
            "cudart": lambda: SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self._unregister),
            "check_error": lambda code: None,
        }
        for name, value in played.items():
            monkeypatch.setattr(torch.cuda, name, value)
        # torch's own reads no stream but its own
        monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: self.keep_for(tensor, stream.actor))
        run_backward = torch.autograd._engine_run_backward

        def run_backward_seen(*args: Any, **kwargs: Any) -> Any:
            with _Faces(self):  # torch leaves it for the length of backward; hooks need it
                return run_backward(*args, **kwargs)

        monkeypatch.setattr(torch.autograd, "_engine_run_backward", run_backward_seen)
        monkeypatch.setattr(dist, "batch_isend_irecv", self._travel)
        monkeypatch.setattr(ThreadQueue, "submit", self._traced_submit(ThreadQueue.submit))
        monkeypatch.setattr(StreamQueue, "submit", self._polled_submit(StreamQueue.submit))

    def _play_memory(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Do nothing: within running() all of torch makes tensors as on a GPU."""

    def _make_stream(self, device: torch.device, priority: int = 0) -> RecordedStream:
        return RecordedStream(self, torch.device(device))

    def _make_event(self, *, enable_timing: bool = False) -> RecordedEvent:
        return RecordedEvent(self)

    def new_actor(self) -> Actor:
        """Number one more stream or thread."""
        self._num_actors += 1
        return self._num_actors

    def new_number(self) -> int:
        """Number one more piece of memory."""
        self._num_memories += 1
        return self._num_memories

    @property
    def thread(self) -> Actor:
        """Return the number of the calling thread."""
        if not hasattr(self.local, "actor"):
            self.local.actor = self.new_actor()
        return int(self.local.actor)

    @property
    def stream(self) -> Actor:
        """Return the number of the calling thread's current stream."""
        return int(self.current_stream().actor)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Let the calling thread use the GPU."""
        with _Faces(self), _Operators(self):
            yield

    # --- memory ---

    def memory(self, tensor: Tensor, *, is_there: bool = False) -> _Memory:
        """Return what is known of a tensor's memory; is_there says where it is, if it is new."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
        if storage._cdata not in self._memories:
            owner = self.stream if is_there else self.thread
            reference = StorageWeakRef(storage)  # while it is kept no other memory has the same address
            self._memories[storage._cdata] = _Memory(self.new_number(), reference, is_there, owner)
        return self._memories[storage._cdata]

    def is_there(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the GPU."""
        return self.memory(tensor).is_there

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in memory that is locked for a GPU."""
        return _address(tensor) in self._pinned

    def pin(self, tensor: Tensor) -> Tensor:
        """Take its memory for locked."""
        self._pinned.add(_address(tensor))
        return tensor

    def keep_for(self, tensor: Tensor, stream: Actor) -> None:
        """Take it that torch gives the memory to no allocation before another stream is done with it."""
        assert stream != self.memory(tensor).owner
        self._kept.add(self.memory(tensor).number)

    def _register(self, address: int, *_: int) -> int:
        self._pinned.add(address)
        return 0

    def _unregister(self, address: int) -> int:
        self._pinned.remove(address)
        return 0

    def _freed_by(self, stream: Actor) -> list[int]:
        """Return, once, what an allocation on this stream takes again, without a wait for any other stream."""
        gone = [key for key, memory in self._memories.items() if memory.reference.expired()]
        # that of the host is not a danger: torch keeps what is locked until the copies that use it have ended
        self._freed += [
            memory for memory in map(self._memories.pop, gone) if memory.is_there and memory.number not in self._kept
        ]
        taken = [memory.number for memory in self._freed if memory.owner == stream]
        self._freed = [memory for memory in self._freed if memory.owner != stream]
        return taken

    # --- what happens ---

    def launch(
        self, what: str, *, reads: Sequence[Tensor], writes: Sequence[Tensor] = (), made: Sequence[Tensor] = ()
    ) -> None:
        """Record an operator: on the current stream where a tensor of the GPU takes part, else by the host itself."""
        is_there = any(map(self.is_there, (*reads, *writes, *made)))
        actor, what = (self.stream if is_there else self.thread), f"{what} in {place()}"
        read, written = ({self.memory(t).number for t in some} - self._polled for some in (reads, (*writes, *made)))
        if is_there:
            self.trace.follow(actor, self.thread)
            if made and (again := self._freed_by(actor)):
                self.trace.launch(actor, f"an allocation for {what}", writes=again)
            if self._captured is not None:
                self._captured.reads |= read
                self._captured.writes |= written
        self.trace.launch(actor, what, reads=read, writes=written)

    def copied(self, way: str, *, is_blocking: bool) -> None:
        """Take note of what was launched as a copy between host and GPU, for which the host may wait."""
        self.copies.append(Copy(way, is_blocking, place()))
        if is_blocking:
            self.trace.follow(self.thread, self.stream)

    def _travel(self, hops: Sequence[dist.P2POp]) -> list[Any]:
        """As torch does: it starts after what the current stream has, which continues after it only from wait() on.

        Each has an actor of its own: torch promises no order among messages, though NCCL keeps one.
        """
        tensors = [hop.tensor for hop in hops]
        is_there = any(map(self.is_there, tensors))

        def current() -> Actor:
            return self.stream if is_there else self.thread

        carrier = self.new_actor()
        self.trace.follow(carrier, current())
        sent, received = ({self.memory(h.tensor).number for h in hops if h.op is op} for op in (dist.isend, dist.irecv))
        self.trace.launch(carrier, f"a message in {place()}", reads=sent, writes=received)
        marker = self.trace.mark(carrier)
        # tensors: torch keeps them until then
        return [SimpleNamespace(wait=lambda: self.trace.wait(current(), [marker], place=place()), tensors=tensors)]

    def _traced_submit(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        def traced(queue: ThreadQueue, operation: Callable[[], None], **facts: Any) -> SimpleNamespace:
            sent, done = self.trace.mark(self.thread), list[Marker]()

            def run() -> None:
                self.trace.wait(self.thread, [sent])
                with self.running():
                    operation()
                done.append(self.trace.mark(self.thread))

            work = submit(queue, run, **facts)

            def wait() -> None:
                work.wait()
                self.trace.wait(self.thread, done, place=place())

            return SimpleNamespace(wait=wait)

        return traced

    def _polled_submit(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        def polled(queue: StreamQueue, operation: Callable[[], None], **facts: Any) -> Any:
            self._polled.add(self.memory(queue._done_1).number)  # the host reads it while it is written, on purpose
            return submit(queue, operation, **facts)

        return polled

    @contextmanager
    def _capture(self, graph: "_Graph", *, stream: RecordedStream, **_: Any) -> Iterator[None]:
        outer = self.stream
        self.trace.follow(self.thread, outer)  # torch synchronizes
        self._captured = graph
        with torch.cuda.stream(stream):
            yield
        self._captured = None
        # CUDA refuses a capture in which another stream has not come back to the first one
        self.trace.launch(stream.actor, "the end of a capture", writes=graph.reads | graph.writes)
        self.trace.follow(outer, stream.actor)  # nothing of it has run


class _Graph:
    """A graph: its replay does at once, on the current stream, all that was captured."""

    def __init__(self, gpu: RecordedGpu) -> None:
        self._gpu = gpu
        self.reads: set[int] = set()
        self.writes: set[int] = set()

    def replay(self) -> None:
        """Launch it."""
        self._gpu.trace.follow(self._gpu.stream, self._gpu.thread)
        self._gpu.trace.launch(self._gpu.stream, f"a replay in {place()}", reads=self.reads, writes=self.writes)


class _Faces(TorchFunctionMode):
    """The tensor attributes and functions that concern the device: reading, making and moving."""

    def __init__(self, gpu: RecordedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, gpu = dict(kwargs or {}), self._gpu
        # what torch calls by itself, from below; and its reading of arguments
        if isinstance(func, torch._ops.OpOverload) or func is torch._C._nn._parse_to:
            return func(*args, **kwargs)
        if func == Tensor.device.__get__ and gpu.is_there(args[0]):
            return GPU
        if func == Tensor.is_cuda.__get__:
            return gpu.is_there(args[0])
        if func is Tensor.is_pinned:
            return gpu.is_pinned(args[0])
        if func is Tensor.pin_memory:
            return gpu.pin(args[0].clone())
        if func is Tensor.to:
            return self._moved(*args, **kwargs)
        if func in (Tensor.cpu, Tensor.cuda):
            return self._moved(args[0], "cpu" if func is Tensor.cpu else GPU)
        if func is Tensor.numpy:
            assert not gpu.is_there(args[0]), "can't convert cuda:0 device type tensor to numpy"
        if func is Tensor.tolist and gpu.is_there(args[0]):
            gpu.launch("tolist", reads=args)
            gpu.copied("to the host", is_blocking=True)
        return self._made(func, args, kwargs)

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        device, must_pin = kwargs.pop("device", None), kwargs.pop("pin_memory", False)
        if device is None:
            made = func(*args, **kwargs)
        elif func in (torch.tensor, torch.as_tensor):
            made = self._moved(func(*args, **kwargs), device)
        else:
            with self._at(device):
                made = func(*args, **kwargs, device="cpu")
        return self._gpu.pin(made) if must_pin else made

    @contextmanager
    def _at(self, device: Any) -> Iterator[None]:
        self._gpu.local.makes_there = torch.device(device).type == "cuda"
        yield
        self._gpu.local.makes_there = None

    def _moved(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Do the same as Tensor.to."""
        must_copy = kwargs.pop("copy", False)
        device, dtype, is_async, layout = torch._C._nn._parse_to(*args, **kwargs)
        was_there = self._gpu.is_there(tensor)
        is_there = was_there if device is None else device.type == "cuda"
        more = {} if layout is None else {"memory_format": layout}
        if is_there == was_there:
            return tensor.to(dtype or tensor.dtype, copy=must_copy, **more)
        with self._at("cuda" if is_there else "cpu"):
            moved = torch.empty_like(tensor, dtype=dtype, **more)
        with torch.no_grad():
            return moved.copy_(tensor, non_blocking=is_async)


class _Operators(TorchDispatchMode):
    """Every operator, below autograd: what it reads and writes."""

    def __init__(self, gpu: RecordedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, gpu = kwargs or {}, self._gpu
        name = func._schema.name.removeprefix("aten::")
        given = _tensors((args, kwargs))
        known = {gpu.memory(tensor).number for tensor in given}
        results = func(*args, **kwargs)
        makes_there = getattr(gpu.local, "makes_there", None)
        is_there = any(map(gpu.is_there, given)) if makes_there is None else makes_there
        made = [each for each in _tensors(results) if gpu.memory(each, is_there=is_there).number not in known]
        if name.startswith("c10d::"):
            gpu.launch(name, reads=given, writes=_tensors(args[0]))
        elif made or func._schema.is_mutable or func in WAITING:  # else it is a view
            reads = () if SHAPE_ALONE.match(func._schema.name) else given
            gpu.launch(name, reads=reads, writes=_written(func, args, kwargs), made=made)
            self._note_copy(func, args, kwargs, given)
        return results

    def _note_copy(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor]) -> None:
        gpu = self._gpu
        there = [gpu.is_there(tensor) for tensor in given]
        if func in WAITING and there[0]:
            gpu.copied("to the host", is_blocking=True)
        elif func is torch.ops.aten.copy_.default and there[0] != there[1]:
            # what is not locked goes by way of memory that is, for which the host waits
            is_async = (args[2] if len(args) > 2 else False) and gpu.is_pinned(given[there.index(False)])
            gpu.copied("from the host" if there[0] else "to the host", is_blocking=not is_async)
        elif func in INDEXED and not all(there) and there[0]:
            gpu.copied("from the host", is_blocking=True)
        else:
            strange = [tensor for tensor in given if tensor.dim() and gpu.is_there(tensor) != any(there)]
            assert not strange, f"{func} on two devices in {place()}"


def _address(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage().data_ptr()


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    schema = func._schema.arguments
    named = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
    return [t for a, value in named if a.alias_info is not None and a.alias_info.is_write for t in _tensors(value)]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
