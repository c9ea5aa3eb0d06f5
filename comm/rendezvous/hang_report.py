"""What a hanging rank prints before its process is killed: lost ranks, from the failure detector and flight records.

A flight record is the dump of the recorder that torch keeps of its collectives.
"""

import ctypes
import faulthandler
import signal
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch._C import _distributed_c10d

from bigbatch.comm.rendezvous import limits
from bigbatch.comm.rendezvous.bounded_store import answer_within
from bigbatch.comm.rendezvous.environ import flight_prefix
from bigbatch.comm.rendezvous.failure_detector import late_error
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.recording import Operation, late_for, read_recording
from bigbatch.files import write_named

T = TypeVar("T")


@dataclass(frozen=True)
class Flight:
    """The collectives of a process. Point-to-point messages, which torch counts per pair of ranks, are left out."""

    begun: dict[str, int]
    """Name of a process group -> number of the last collective that began in it."""
    waiting: Operation | None
    """The first collective that has not ended."""


def dump_flight() -> str:
    """Return the recorder's dump as JSON; "" if torch has no recorder or it is empty."""
    for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json"):  # NCCL's own; that of other libraries
        dump = getattr(_distributed_c10d, name, None)
        text = dump().decode(errors="replace") if dump else ""
        if '"entries"' in text:
            return text
    return ""


def read_flight(text: str) -> Flight:
    """Parse a dump. Raises: ValueError, LookupError or TypeError if the format is unknown."""
    collectives = list(read_recording(text.encode()).collectives)
    waiting = next((each for each in collectives if not each.is_over), None)
    return Flight({each.group.name: each.number for each in collectives}, waiting)


def record_flight(text: str, *, rank: int) -> tuple[Flight | None, Path | None]:
    """Write a dump to a file and parse it. Flight: None if the format is unknown. Path: None if the write fails."""
    flight = path = None
    if text:
        with suppress(OSError):
            path = keep_flight(text, rank=rank)
        with suppress(ValueError, LookupError, TypeError, AttributeError):
            flight = read_flight(text)
    return flight, path


def keep_flight(text: str, *, rank: int) -> Path:
    """Write a dump to torch's own prefix plus RANK.json, or without a prefix to a temporary file; return the path.

    Raises: OSError.
    """
    prefix = flight_prefix()
    if prefix:
        path = Path(f"{prefix}{rank}.json")
        write_named(path, text.encode())
        return path
    with tempfile.NamedTemporaryFile("w", prefix=f"bigbatch-flight-rank-{rank}-", suffix=".json", delete=False) as file:
        file.write(text)
    return Path(file.name)


def compare(mine: Flight, others: Mapping[int, Mapping[str, int]]) -> str:
    """Return which ranks have not begun the collective in which this rank waits. others: Flight.begun by rank."""
    waiting = mine.waiting
    if waiting is None:
        return ""
    ranks = waiting.group.ranks or tuple(sorted(others))
    name, number = waiting.group.name, waiting.number
    late, silent = late_for(number, ranks, {rank: begun.get(name, 0) for rank, begun in others.items()})
    behind = [f"rank {rank} has begun {last}" for rank, last in late.items()]
    unknown = [f"rank {rank} did not answer" for rank in silent]
    return ", ".join([f"it waits in collective {number} ({waiting.name}) of process group {name}", *behind, *unknown])


class HangReport:
    """Prints the verdict before a process ends, and compares the ranks' flight records. Its time is bounded."""

    def __init__(self, control: JobControl) -> None:
        self._control, self._detector = control, control.detector
        self._has_dumped = self._has_published = False

    def say(self, label: str, seconds: float, seen: str, *, cause: str = "", by: Callable[[str], None]) -> None:
        """Print what failed and which ranks are lost.

        seen: an earlier finding on the operation. cause: why it failed, if its time limit has not passed.
        """
        # torch's dump calls the driver with the GIL held: if it hangs, no Python thread runs
        with _ended_after(limits.VERDICT_SECONDS):
            recorded = _within(limits.FLIGHT_SECONDS, lambda: record_flight(dump_flight(), rank=self._control.rank))
            flight, path = recorded or (None, None)
            text = _within(limits.EXPLAIN_SECONDS, lambda: self._explain(label, seconds, cause, flight)) or (
                f"{self._detector.failed(label, seconds)}; {self._detector.no_answer}"
            )
            record = f"; torch's flight recorder: {path}" if path else ""
            by(f"{text}{f'; last seen: {seen}' if seen else ''}{record}")
            # last: other ranks may still compare flight records
            self._detector.stop_requests()

    def publish(self) -> None:
        """Publish, once and within FLIGHT_SECONDS, which collectives this rank has begun."""
        if not self._has_dumped:
            self._has_dumped = True
            self._publish(_within(limits.FLIGHT_SECONDS, lambda: read_flight(dump_flight())))

    def _publish(self, flight: Flight | None) -> None:
        if flight is not None and not self._has_published:
            self._has_published = True
            self._detector.log.write("flight", flight.begun)

    def _explain(self, label: str, seconds: float, cause: str, flight: Flight | None) -> str:
        with suppress(RuntimeError):  # if the store is lost, the detector says so
            self._publish(flight)
        error = self._detector.make_error(label, seconds, RuntimeError(cause) if cause else late_error())
        compared = ""
        if flight is not None:
            compared = compare(flight, self._detector.log.state.flights)
        return f"{error}; {compared}" if compared else str(error)


def _within(seconds: float, ask: Callable[[], T]) -> T | None:
    """Return ask(), or None if it fails or takes longer than seconds."""
    with suppress(Exception):
        return answer_within(seconds, ask)
    return None


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Dump all stacks and kill this process by SIGALRM if the block takes longer.

    A launcher restarts a process that a signal ended; faulthandler's own exit would have the code of a user's error.
    The signal has its default action meanwhile, whatever handler a script has set: a Python handler needs the GIL.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    handler = library.signal(signal.SIGALRM, signal.SIG_DFL)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds + limits.STACK_DUMP_SECONDS)
    faulthandler.dump_traceback_later(seconds)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, *timer)
        library.signal(signal.SIGALRM, handler)
