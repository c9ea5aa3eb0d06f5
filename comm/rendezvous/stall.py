"""Stall inspector: name the ranks that others wait for, before the time limit ends the job."""

import ctypes
import faulthandler
import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Event, Thread
from typing import TypeVar

from bigbatch.awake import awake_seconds
from bigbatch.comm.rendezvous.bounded_store import answer_within
from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.flight import Flight, compare, dump_flight, read_flight, record_flight
from bigbatch.comm.rendezvous.roll_call import (
    EXPLAIN_SECONDS,
    FLIGHT_SECONDS,
    LOOK_SECONDS,
    VERDICT_SECONDS,
    late_error,
)
from bigbatch.errors import CommError, tell
from bigbatch.exit_codes import LOST

T = TypeVar("T")

TO_SHOW_SECONDS = 1.0
"""Time between the stack dump and SIGALRM for a process whose shutdown hangs."""
BESIDE_A_QUEUE = -1_000_000
"""Number of the first operation outside of a queue; such numbers stay below those of a queue."""

_FLAG = "bigbatch/stall/operation"
_FLIGHTS = "bigbatch/stall/flights"


@dataclass(frozen=True)
class Pending:
    """An operation under way. number: in order of submission. since: awake_seconds()."""

    number: int
    label: str
    since: float
    ranks: tuple[int, ...] | None = None
    """Ranks that take part; None for all."""

    @property
    def seconds(self) -> float:
        """Return the seconds since it began."""
        return awake_seconds() - self.since


class StallInspector:
    """Watches this rank's operations from its own threads, and prints which ranks are late for one.

    A rank that has waited warn_seconds in an operation sets a flag in the store. The other ranks poll the flag a few
    times per warn_seconds and write whether they wait in the same operation; a rank that does not write is late. Each
    waiting rank names the late ones, and a late rank that still runs prints that others wait for it. A poll costs one
    small request.
    ends_job: also end this process after the control's timeout. For transports that only enqueue (NCCL), where no
    thread of ours waits. A second thread then watches the clock without the store, so a store that is lost or hangs
    delays the end only by the time of the verdict. Before the end the flight recorder is written to a file, and the
    ranks' collectives are compared.
    """

    def __init__(
        self,
        control: Control,
        oldest: Callable[[], Pending | None] = lambda: None,
        *,
        warn_seconds: float,
        ends_job: bool = False,
        say: Callable[[str], None] = tell,
    ) -> None:
        self._control, self._oldest = control, oldest
        self._warn_seconds, self._say = warn_seconds, say
        # four polls per warn_seconds: answers of others come at most a quarter of it late
        self._look_seconds = min(LOOK_SECONDS, warn_seconds / 4)
        self._store = control.store
        """View of the store for one poll: no answer within warn_seconds is worth a warning."""
        self._beside = itertools.count(BESIDE_A_QUEUE)
        self._noted: Pending | None = None
        self._noted_at = 0.0
        self._said: set[int] = set()
        self._verdicts: dict[int, str] = {}
        """Operation number -> what was printed about its late ranks, for the time after the store is lost."""
        self._ends_job = ends_job
        self._has_told = self._has_dumped = False
        self._closed = Event()
        rounds = [self._ask, self.count] if ends_job else [self._ask]
        self._threads = [
            Thread(target=self._repeat, args=(each,), name="bigbatch-stall", daemon=True) for each in rounds
        ]
        for thread in self._threads:
            thread.start()

    @contextmanager
    def during(self, label: str) -> Iterator[None]:
        """Watch the block as an operation of all ranks. Operations of the queue, if there is one, take precedence.

        All ranks make these calls in the same order.
        """
        queued, pending = self._oldest, Pending(next(self._beside), label, awake_seconds())
        self.follow(lambda: queued() or pending)
        try:
            yield
        finally:
            self.follow(queued)

    def follow(self, oldest: Callable[[], Pending | None]) -> None:
        """Watch the operations of a queue, numbered from 1, from now on."""
        self._oldest = oldest

    def close(self) -> None:
        """Stop watching."""
        self._closed.set()
        for thread in self._threads:
            # one may wait for a store that does not answer any more
            thread.join(timeout=LOOK_SECONDS)

    def _repeat(self, look: Callable[[], None]) -> None:
        while not self._closed.wait(self._look_seconds):
            look()

    def _ask(self) -> None:
        try:
            self.look()
        except RuntimeError:  # the store is lost, or closed at the end of a good run
            pending = self._oldest()
            if pending and pending.seconds > self._warn_seconds and pending.number not in self._said:
                self._said.add(pending.number)
                self._say(self._waits(pending, self._control.roll_call.silence))

    def count(self) -> None:
        """Check the clock once; end this process after the time limit. Does not need the store."""
        pending = self._oldest()
        if pending and pending.seconds > self._control.timeout_seconds:
            # torch's dump calls the driver with the GIL held: if it hangs, no Python thread runs
            with _ended_after(VERDICT_SECONDS):
                self._say(self._last_words(pending))
                # last: other ranks may still compare flight records
                self._control.roll_call.part()
            os._exit(LOST)  # the main thread waits for the device and cannot be interrupted

    def _last_words(self, pending: Pending) -> str:
        seconds = pending.seconds
        recorded = _within(FLIGHT_SECONDS, lambda: record_flight(dump_flight(), rank=self._control.rank))
        flight, path = recorded or (None, None)
        text = _within(EXPLAIN_SECONDS, lambda: self._explain(pending, seconds, flight)) or (
            f"{self._control.failed(pending.label, seconds)}; {self._control.roll_call.silence}"
        )
        seen = self._verdicts.get(pending.number)
        record = f"; torch's flight recorder: {path}" if path else ""
        return f"{text}{f'; last seen: {seen}' if seen else ''}{record}"

    def _explain(self, pending: Pending, seconds: float, flight: Flight | None) -> str:
        with suppress(RuntimeError):  # if the store is lost, the control says so
            self._tell(flight)
        error: CommError = self._control.describe(pending.label, seconds, late_error())
        compared = ""
        if flight is not None:
            with suppress(RuntimeError):
                compared = compare(flight, self._told())
        return f"{error}; {compared}" if compared else str(error)

    def _tell(self, flight: Flight | None) -> None:
        """Publish, once, which collectives this rank has begun."""
        if flight is not None and not self._has_told:
            self._has_told = True
            self._control.store.append(_FLIGHTS, json.dumps([self._control.rank, flight.begun]) + "\n")

    def _told(self) -> dict[int, dict[str, int]]:
        """Return rank -> its begun collectives, of the ranks that have published them."""
        text = self._control.store.get(_FLIGHTS).decode() if self._control.store.check([_FLIGHTS]) else ""
        return dict(json.loads(line) for line in text.splitlines())

    def _answer_with_flight(self) -> None:
        """Publish which collectives this rank has begun, within FLIGHT_SECONDS."""
        if self._ends_job and not self._has_dumped:
            self._has_dumped = True
            self._tell(_within(FLIGHT_SECONDS, lambda: read_flight(dump_flight())))

    def look(self) -> None:
        """Poll once: this rank's operation, and the flag of the others."""
        pending = self._oldest()
        waited = pending.seconds if pending else 0.0
        self._control.roll_call.answer(
            is_waiting=pending is not None, tell=self._answer_with_flight, asks_for_more=self._ends_job
        )
        self._store = self._control.store.within(self._warn_seconds)
        flagged = int(self._store.get(_FLAG)) if self._store.check([_FLAG]) else None
        if pending and waited > self._warn_seconds and flagged != pending.number:
            self._store.set(f"bigbatch/stall/{pending.number}/label", pending.label)
            self._store.set(f"bigbatch/stall/{pending.number}/of", " ".join(map(str, self._ranks_of(pending))))
            self._store.set(_FLAG, str(pending.number))
            flagged = pending.number
        if flagged is None:
            return
        if pending and pending.number == flagged:
            self._note(pending)
            # after two polls every rank that waits in it has written so
            if flagged not in self._said and awake_seconds() - self._noted_at > 2 * self._look_seconds:
                self._said.add(flagged)
                here = {int(rank) for rank in self._store.get(f"bigbatch/stall/{flagged}/ranks").split()}
                late = [rank for rank in self._ranks_of(pending) if rank not in here]
                names = ", ".join(f"rank {rank} on {self._control.host_of(rank)}" for rank in late)
                verdict = (
                    f"{names} {'has' if len(late) == 1 else 'have'} not come to it" if late else "all ranks are in it"
                )
                self._verdicts[flagged] = verdict
                self._say(self._waits(pending, verdict))
        elif (
            flagged not in self._said
            and (pending is None or pending.number < flagged)
            # the flag stays after the operation has ended
            and (self._noted is None or self._noted.number < flagged)
            and self._is_in(flagged)
        ):
            self._said.add(flagged)
            label = self._store.get(f"bigbatch/stall/{flagged}/label").decode()
            self._say(f"rank {self._control.rank} on {self._control.host} is late: other ranks wait for it in {label}")

    def _ranks_of(self, pending: Pending) -> Sequence[int]:
        return range(self._control.world_size) if pending.ranks is None else pending.ranks

    def _note(self, pending: Pending) -> None:
        """Write, once, that this rank waits in the operation."""
        if self._noted is None or self._noted.number != pending.number:
            self._noted, self._noted_at = pending, awake_seconds()
            key = f"bigbatch/stall/{pending.number}"
            self._store.append(f"{key}/ranks", f"{self._control.rank} ")
            # another group may have set the flag: groups number their operations alike
            if not self._is_in(pending.number):
                self._store.append(f"{key}/of", "".join(f" {rank}" for rank in self._ranks_of(pending)))

    def _is_in(self, number: int) -> bool:
        """Return whether this rank is known to take part in the flagged operation."""
        return str(self._control.rank) in self._store.get(f"bigbatch/stall/{number}/of").decode().split()

    def _waits(self, pending: Pending, verdict: str) -> str:
        return (
            f"rank {self._control.rank} on {self._control.host} has waited {pending.seconds:.1f} s in {pending.label}: "
            f"{verdict} (the job ends after {self._control.timeout_seconds:g} s)"
        )


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
    timer = signal.setitimer(signal.ITIMER_REAL, seconds + TO_SHOW_SECONDS)
    faulthandler.dump_traceback_later(seconds)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, *timer)
        library.signal(signal.SIGALRM, handler)
