"""Operations in flight during backward: a thread for host tensors, a stream for GPU tensors."""

from collections import deque
from collections.abc import Callable
from concurrent import futures
from dataclasses import replace
from queue import SimpleQueue
from threading import Lock, Thread

import torch
from typing_extensions import Unpack

from bigbatch.awake import awake_seconds
from bigbatch.comm.backends.base import InFlight
from bigbatch.comm.rendezvous.control import Control, OperationFacts, Pending
from bigbatch.comm.rendezvous.limits import POLL_SECONDS
from bigbatch.errors import CommError, PeerLostError

ABORT_SECONDS = 2.0
"""Time limit of the wait for an aborted operation to end."""

Explain = Callable[[str, float, Exception], CommError]
"""(label, seconds waited, cause) -> the error to raise."""
WhileWaiting = Callable[[str, float], None]
"""(label, seconds waited so far): called every POLL_SECONDS of a wait; raises to give up."""
Begin = Callable[[Pending], object]


class LateError(Exception):
    """A wait has reached the queue's own limit. pending: the operation that it waited for."""

    def __init__(self, pending: Pending) -> None:
        super().__init__(f"{pending.label} is late")
        self.pending = pending


def give_up_together(queue: "ThreadQueue | StreamQueue", control: Control, *, end: Callable[[], None]) -> None:
    """Abort the sums of a queue, by end, after all ranks have given them up: none then misses another. Collective."""

    def end_together() -> None:
        control.gather_text("", what="end of a sum that hangs")
        end()

    queue.give_up(CommError("the sum hung and was aborted"), end=end_together)


class ThreadQueue:
    """Runs operations one after another on a separate thread (host tensors; collectives that block).

    After a failure the ranks are out of step, so every later operation fails at once with the same error. The thread is
    a daemon: if it hangs in a collective, it does not keep a failed process alive.
    """

    def __init__(
        self, explain: Explain, *, while_waiting: WhileWaiting, begin: Begin = lambda pending: None, number: int = 0
    ) -> None:
        """begin: see self.begin. number: that of the last operation in the queue that this one replaces, if any."""
        self.begin = begin
        """Called on the thread before each operation; may raise to refuse it."""
        self._explain = explain
        self._while_waiting = while_waiting
        self._failure: CommError | None = None
        self.number = number
        """Number of the last operation submitted."""
        self.limit_seconds: float | None = None
        """Limit of a wait, which then raises LateError; None: while_waiting's alone."""
        self._under_way: deque[Pending] = deque()
        self.is_closed = False
        self._jobs: SimpleQueue[tuple[futures.Future[None], Callable[[], None], Pending] | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="bigbatch-comm", daemon=True)
        self._thread.start()

    def submit(self, operation: Callable[[], None], **facts: Unpack[OperationFacts]) -> InFlight:
        """Queue the operation; its failure is raised by wait(). Raises: CommError after close()."""
        if self.is_closed:
            raise CommError(f"{facts['label']} cannot start: the communicator is closed")
        future: futures.Future[None] = futures.Future()
        self.number += 1
        pending = Pending(self.number, since=awake_seconds(), **facts)
        self._under_way.append(pending)
        self._jobs.put((future, operation, pending))

        def wait() -> None:
            start = awake_seconds()
            while not futures.wait([future], timeout=POLL_SECONDS).done:
                # an earlier operation may block this one
                running = self.oldest()
                waited = awake_seconds() - start
                self._while_waiting((running or pending).label, waited)
                if self.limit_seconds is not None and waited > self.limit_seconds:
                    raise LateError(pending)
            future.result()

        return InFlight(wait)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, operation, pending = job
            self._under_way[0] = replace(pending, since=awake_seconds())
            try:
                self._run(operation, pending)
                future.set_result(None)
            except Exception as error:  # raised again by wait()
                future.set_exception(error)
            self._under_way.popleft()

    def oldest(self) -> Pending | None:
        """Return the operation that runs now, or is the next to run."""
        return next(iter(self._under_way.copy()), None)

    def _run(self, operation: Callable[[], None], pending: Pending) -> None:
        # after a failure the peers would match this operation with a different one
        if self._failure:
            raise self._failure
        start = awake_seconds()
        try:
            self.begin(pending)
            operation()
        except PeerLostError as error:  # explained already
            self._failure = error
            raise
        except Exception as error:
            self._failure = self._failure or self._explain(pending.label, awake_seconds() - start, error)
            raise self._failure from error

    def close(self) -> None:
        """Stop the thread, after the queued operations."""
        self.is_closed = True
        self._jobs.put(None)
        self._thread.join()

    def successor(self, *, num_missed: int) -> "ThreadQueue":
        """Return a new queue. num_missed: number of operations that other ranks have submitted and this one has not."""
        number = self.number + num_missed
        return ThreadQueue(self._explain, while_waiting=self._while_waiting, begin=self.begin, number=number)

    def give_up(self, error: CommError, *, end: Callable[[], None]) -> None:
        """Fail the queued operations, and stop the thread; wait up to ABORT_SECONDS for the operation under way.

        end: makes that operation fail.
        """
        self.is_closed = True
        self._failure = self._failure or error
        end()
        self._jobs.put(None)
        self._thread.join(ABORT_SECONDS)


def behind_kernels(
    operation: Callable[[], None], gpu: torch.device, *, stream: torch.cuda.Stream | None = None
) -> Callable[[], None]:
    """Make an operation on GPU memory safe for another thread.

    The operation begins after the calling thread's GPU work so far, and returns when the GPU has finished it.
    stream: where a library enqueues the operation; None if the library does not use streams.
    """
    ready = torch.cuda.Event()
    ready.record(torch.cuda.current_stream(gpu))

    def on_gpu() -> None:
        with torch.cuda.device(gpu), torch.cuda.stream(stream):  # a thread starts with the first GPU as its current one
            if stream is None:
                ready.synchronize()
            else:
                stream.wait_event(ready)
            operation()
            torch.cuda.current_stream(gpu).synchronize()

    return on_gpu


class StreamQueue:
    """Enqueues operations on a separate CUDA stream, so that they overlap with backward's kernels.

    The GPU writes its progress as a number into host memory, behind each operation. Watching threads read that and call
    nothing of CUDA: a query of an event, by any thread, breaks a capture that a script has begun in torch's default
    mode, and may hang if the GPU does.
    """

    def __init__(self, device: torch.device, *, number: int = 0) -> None:
        """number: that of the last operation in the queue that this one replaces, if any."""
        # high priority: communication goes before kernels of backward that have not begun, because other ranks wait
        self._stream = torch.cuda.Stream(device, priority=-1)
        with torch.cuda.device(device), torch.cuda.stream(self._stream):
            self._number_1 = torch.zeros(1, dtype=torch.int64, device=device)
            self._done_1 = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self.number = number
        """Number of the last operation submitted."""
        self.limit_seconds: float | None = None
        """Limit of a wait, for which the host waits then; after it the wait raises LateError."""
        self._enqueued: deque[Pending] = deque()
        self._lock = Lock()
        """Guards _enqueued, which the submitting thread and the watching threads all pop from."""
        self.is_closed = False

    def submit(self, operation: Callable[[], None], **facts: Unpack[OperationFacts]) -> InFlight:
        """Enqueue behind the work of the calling thread's current stream so far."""
        device = self._stream.device
        is_watched = not torch.cuda.is_current_stream_capturing()  # a replay would repeat the capture's number
        self.number += is_watched
        pending = Pending(self.number, since=awake_seconds(), **facts)
        if is_watched:
            with self._lock:
                self._drop_done()
                # before the operation, which may block the host: a barrier does, and a group's first connection
                self._enqueued.append(pending)
        # on the device: the host does not stop
        self._stream.wait_stream(torch.cuda.current_stream(device))
        # if a script's current GPU is another one, leaving the stream alone would create a CUDA context there
        with torch.cuda.device(device), torch.cuda.stream(self._stream), torch.profiler.record_function(pending.label):
            try:
                operation()
            except BaseException:
                if is_watched:
                    with self._lock:
                        self._enqueued.pop()  # nothing is under way
                raise
            event = torch.cuda.Event()
            event.record()
            if is_watched:
                # behind the event: waiting for the operation does not wait for this
                self._number_1.fill_(self.number)
                self._done_1.copy_(self._number_1, non_blocking=True)

        def wait() -> None:
            if self.limit_seconds is not None and is_watched:
                self._wait_on_host(pending, self.limit_seconds)
            torch.cuda.current_stream(device).wait_event(event)

        return InFlight(wait)

    def _wait_on_host(self, pending: Pending, seconds: float) -> None:
        """Wait until the GPU has finished the operation, without a pause: it may be a short one that is timed."""
        start = awake_seconds()
        while int(self._done_1) < pending.number:
            if awake_seconds() - start > seconds:
                raise LateError(pending)

    def oldest(self) -> Pending | None:
        """Return the first operation that the device has not finished."""
        with self._lock:
            self._drop_done()
            return self._enqueued[0] if self._enqueued else None

    def _drop_done(self) -> None:
        done = int(self._done_1)
        while self._enqueued and self._enqueued[0].number <= done:
            self._enqueued.popleft()

    def close(self) -> None:
        """Wait for all operations under way."""
        self.is_closed = True
        self._stream.synchronize()

    def give_up(self, error: CommError, *, end: Callable[[], None]) -> None:
        """Forget the operations under way. end: makes the GPU finish them. error: for ThreadQueue."""
        self.is_closed = True
        end()
        with self._lock:
            self._enqueued.clear()

    def successor(self, *, num_missed: int) -> "StreamQueue":
        """Return a new queue; see ThreadQueue.successor()."""
        return StreamQueue(self._stream.device, number=self.number + num_missed)
