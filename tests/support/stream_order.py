"""What happens before what on a GPU, by a trace of what each stream and each thread of the host does.

A trace goes into the event handler of torch's CUDA sanitizer, which finds any two accesses to a tensor, one of them a
write, that nothing has put into an order. Each thread of the host is an actor of its own there, beside the streams:
what it launches comes after all that it knows to be done, and a wait of the host tells one thread, not all.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest.mock import patch

from torch.cuda import _sanitizer

Actor: TypeAlias = int
"""A stream, or a thread of the host."""
Marker: TypeAlias = int
"""A moment of an actor, as a CUDA event is."""


@dataclass(frozen=True)
class Launch:
    """A thread lets an actor, which may be itself, read some memory and write other."""

    thread: Actor
    actor: Actor
    reads: frozenset[int]
    writes: frozenset[int]
    what: str


@dataclass(frozen=True)
class Mark:
    """A thread marks the work that an actor has been given, as far as that thread knows it."""

    thread: Actor
    actor: Actor
    marker: Marker


@dataclass(frozen=True)
class Wait:
    """An actor continues only after some markers."""

    actor: Actor
    markers: tuple[Marker, ...]
    place: str
    """The code that asked for the wait; empty if the device or torch waits by itself."""


Event: TypeAlias = Launch | Mark | Wait


class Trace:
    """All that happened, in the order in which it was asked for."""

    def __init__(self, thread: Callable[[], Actor]) -> None:
        """thread: returns the calling thread's name."""
        self._thread = thread
        self.events: list[Event] = []
        self._judged_from = 0

    def judge_from_here(self) -> None:
        """Ask no questions about the waits so far: those of setting up."""
        self._judged_from = len(self.events)

    def mark(self, actor: Actor) -> Marker:
        """Put a marker behind what the actor has been given."""
        marker = len(self.events)
        self.events.append(Mark(self._thread(), actor, marker))
        return marker

    def wait(self, actor: Actor, markers: Sequence[Marker], *, place: str = "") -> None:
        """Let an actor wait."""
        self.events.append(Wait(actor, tuple(markers), place))

    def follow(self, actor: Actor, other: Actor) -> None:
        """Let an actor continue after what another one has been given, as nature has it."""
        self.wait(actor, [self.mark(other)])

    def launch(self, actor: Actor, what: str, *, reads: Iterable[int] = (), writes: Iterable[int] = ()) -> None:
        """Let an actor read and write."""
        written = frozenset(writes)
        self.events.append(Launch(self._thread(), actor, frozenset(reads) - written, written, what))

    def waits(self) -> dict[int, str]:
        """Return the judged waits that code asked for: their places in events, and that code."""
        events = list(enumerate(self.events))[self._judged_from :]
        return {at: each.place for at, each in events if isinstance(each, Wait) and each.place}

    def objections(self, *, without: int | None = None) -> list[str]:
        """Return the sanitizer's, to all of it or without one of its events."""
        check = _Check()
        # a stack for each launch, of this loop, would take most of the time
        no_stack = SimpleNamespace(StackSummary=SimpleNamespace(extract=lambda *_, **__: []), walk_stack=lambda _: ())
        with patch.object(_sanitizer, "traceback", no_stack):
            for at, event in enumerate(self.events):
                if at != without:
                    check.take(event)
        return check.objections


class _Check:
    """The sanitizer, and what it does not know: that a thread can mark only what it knows to have been launched."""

    def __init__(self) -> None:
        self.objections: list[str] = []
        self._handler = _sanitizer.EventHandler()
        self._states = self._handler.syncs.current_sync_states
        self._known: dict[Actor, dict[Actor, int]] = {}
        """How many launches of each thread a thread knows of."""
        self._told: dict[Marker, dict[Actor, int]] = {}
        """What a thread knew when it marked itself."""
        self._launched: dict[Actor, list[tuple[Actor, int, dict[int, int]]]] = {}
        """By stream: launching thread, number of its launch, and the stream's state before."""
        self._last: dict[Actor, dict[Actor, int]] = {}
        """By stream and thread: the number of the last launch."""

    def take(self, event: Event) -> None:
        if isinstance(event, Launch):
            self._launch(event)
        elif isinstance(event, Mark):
            self._mark(event)
        else:
            for marker in event.markers:
                self._handler._handle_event_wait(marker, event.actor)
                for thread, number in self._told.get(marker, {}).items():
                    known = self._known.setdefault(event.actor, {})
                    known[thread] = max(known.get(thread, 0), number)

    def _launch(self, event: Launch) -> None:
        known = self._known.setdefault(event.thread, {})
        known[event.thread] = known.get(event.thread, 0) + 1
        self._last.setdefault(event.actor, {})[event.thread] = known[event.thread]
        before = copy(self._states.get(event.actor, {}))
        self._launched.setdefault(event.actor, []).append((event.thread, known[event.thread], before))
        names: dict[int, list[str]] = {number: [] for number in event.reads | event.writes}
        errors: list[Any] = self._handler._handle_kernel_launch(
            event.actor,
            set(event.reads),
            set(event.writes),
            set(),
            event.what,  # type: ignore[arg-type]
            names,
        )
        pairs = [(each.current_access.operator, each.previous_access.operator) for each in errors]
        self.objections += [f"{later} may come before {earlier}" for later, earlier in pairs]

    def _mark(self, event: Mark) -> None:
        self._handler._handle_event_record(event.marker, event.actor)
        known = self._known.get(event.thread, {})
        if event.actor == event.thread:
            self._told[event.marker] = copy(known)
            return
        if all(number <= known.get(thread, 0) for thread, number in self._last.get(event.actor, {}).items()):
            return
        for thread, number, before in self._launched.get(event.actor, ()):
            if number > known.get(thread, 0):  # it may come after the marker
                self._handler.syncs.recorded_sync_states[event.marker] = copy(before)
                return


def require_every_wait(trace: Trace, *, by_place: str | None = None) -> None:
    """Assert that all is in order, and would not be without any one of the waits.

    by_place: what the names of some places hold. Of the waits that such a place asks for one is enough, as where it is
    called twice with nothing in between.
    """
    assert (objections := trace.objections()) == [], objections[:3]
    waits = trace.waits()
    needed = [place for at, place in waits.items() if trace.objections(without=at)]
    idle = Counter(waits.values()) - Counter(needed)
    for place in set(needed):
        if by_place is not None and by_place in place:
            del idle[place]
    repeated = len(waits) - len(needed) - idle.total()
    told = f"{len(needed)} of {len(waits)} waits are needed, {repeated} repeat one of these, {idle.total()} too many"
    print(f"{told}, in {len(trace.events)} events")
    assert not idle, f"no objection without {idle}"
    assert waits
