"""Last words of a rank that nothing else ends: which ranks are lost, by the failure detector and by flight records."""

import ctypes
import faulthandler
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

from bigbatch.comm.rendezvous import limits
from bigbatch.comm.rendezvous.bounded_store import answer_within
from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.failure_detector import late_error
from bigbatch.comm.rendezvous.flight import Flight, compare, dump_flight, read_flight, record_flight

T = TypeVar("T")


class LastWords:
    """Prints the verdict before a process ends, and compares the ranks' flight records. Its time is bounded."""

    def __init__(self, control: Control) -> None:
        self._control, self._detector = control, control.detector
        self._has_dumped = self._has_published = False

    def say(self, label: str, seconds: float, seen: str, *, by: Callable[[str], None]) -> None:
        """Print what failed and which ranks are lost. seen: an earlier finding on the operation."""
        # torch's dump calls the driver with the GIL held: if it hangs, no Python thread runs
        with _ended_after(limits.VERDICT_SECONDS):
            recorded = _within(limits.FLIGHT_SECONDS, lambda: record_flight(dump_flight(), rank=self._control.rank))
            flight, path = recorded or (None, None)
            text = _within(limits.EXPLAIN_SECONDS, lambda: self._explain(label, seconds, flight)) or (
                f"{self._detector.failed(label, seconds)}; {self._detector.silence}"
            )
            record = f"; torch's flight recorder: {path}" if path else ""
            by(f"{text}{f'; last seen: {seen}' if seen else ''}{record}")
            # last: other ranks may still compare flight records
            self._detector.part()

    def publish(self) -> None:
        """Publish, once and within FLIGHT_SECONDS, which collectives this rank has begun."""
        if not self._has_dumped:
            self._has_dumped = True
            self._publish(_within(limits.FLIGHT_SECONDS, lambda: read_flight(dump_flight())))

    def _publish(self, flight: Flight | None) -> None:
        if flight is not None and not self._has_published:
            self._has_published = True
            self._detector.log.write("flight", flight.begun)

    def _explain(self, label: str, seconds: float, flight: Flight | None) -> str:
        with suppress(RuntimeError):  # if the store is lost, the detector says so
            self._publish(flight)
        error = self._detector.describe(label, seconds, late_error())
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
    timer = signal.setitimer(signal.ITIMER_REAL, seconds + limits.TO_SHOW_SECONDS)
    faulthandler.dump_traceback_later(seconds)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, *timer)
        library.signal(signal.SIGALRM, handler)
