"""What the ranks of a job know of failures: a pure transition table, without I/O, threads or a clock.

Each rank appends events to one log and reads all events there, in the same order. So all ranks come to the same state
and the same verdict. An event is (name, rank, ...):

| event | meaning | its effect |
|---|---|---|
| failed, cause | its wait failed: LATE after a time limit, LOST otherwise | ranks answer; the first such rank counts |
| crashed, exit code | its own code failed | it is missing; the first failure sets the cause and the exit code |
| alive | it answers | it is not missing |
| verdict, ranks, text | the outcome of a roll call | the first one holds |
| heard | it asks the store for nothing more | the store's holder need not wait for it |
| left, number | it begins no operation after that number | waits of others for it end |
| ended | it has passed the last barrier | it is not missing |
| waits, number, label, ranks | it waits in an operation in which some rank waits long | late ranks are named |
| flight, collectives | which collectives torch's flight recorder has seen begin | ranks can compare theirs |
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from bigbatch.comm.rendezvous import limits

LATE, LOST = "late", "lost"
"""Why the ranks are asked to answer: a time limit; the end or failure of a rank."""
MAX_STALLS = 8
"""Number of stalls kept, the newest: each group of ranks may have one."""

NONE: frozenset[int] = frozenset()
Event = tuple[Any, ...]


@dataclass(frozen=True)
class Verdict:
    """The outcome of a failure. lost: the missing ranks. since: when this rank read the failure; awake_seconds()."""

    lost: frozenset[int]
    reason: str
    since: float


@dataclass(frozen=True)
class Stall:
    """An operation in which ranks wait long. ranks: those that take part; waiting: those that logged their wait."""

    number: int
    label: str
    ranks: frozenset[int]
    waiting: frozenset[int]


@dataclass(frozen=True)
class JobState:
    """What a rank has read of the log, and which processes the store has seen end (gone)."""

    world_size: int
    gone: frozenset[int] = NONE
    cause: str = ""
    """LATE or LOST, by the first failure; "" if there is none."""
    since: float = 0.0
    exit_code: int | None = None
    """Exit code of the first rank that failed, if it has crashed and logged the code."""
    caller: int | None = None
    """The rank that counts the answers, since called_at."""
    called_at: float = 0.0
    crashed: frozenset[int] = NONE
    alive: frozenset[int] = NONE
    heard: frozenset[int] = NONE
    ended: frozenset[int] = NONE
    left: Mapping[int, int] = field(default_factory=dict)
    """Rank that begins no more operations -> how many it has begun."""
    stalls: tuple[Stall, ...] = ()
    flights: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    verdict: Verdict | None = None

    @property
    def missing(self) -> frozenset[int]:
        """Return the ranks that have neither ended well nor answered, or whose process has ended after its answer."""
        return frozenset(range(self.world_size)) - (self.alive - self.gone) - self.ended

    @property
    def vanished(self) -> frozenset[int]:
        """Return the ranks whose processes have ended without the event "ended" or "crashed"."""
        return self.gone - self.ended - self.crashed

    def left_before(self, number: int) -> list[int]:
        return sorted(rank for rank, num_begun in self.left.items() if num_begun < number)

    @property
    def late(self) -> frozenset[int]:
        """Return the ranks that have not started the newest operation of the caller's wait; none after a failure."""
        stalls = [each for each in self.stalls if self.caller in each.waiting and self.cause == LATE]
        newest = max(stalls, key=lambda each: each.number, default=None)
        return newest.ranks - newest.waiting if newest else NONE

    def stall(self, number: int) -> Stall | None:
        return next((each for each in self.stalls if each.number == number), None)

    def needs_no_store(self, now: float) -> bool:
        """Return whether all ranks have ended, a verdict exists, or the time to reach one is over."""
        # a rank whose own code failed asks no ranks to answer, so a verdict may never come
        is_old = self.cause and now - self.since > limits.ROLL_CALL_SECONDS + 2 * limits.LINGER_SECONDS
        return bool(self.verdict or is_old) or len(self.ended | self.gone) == self.world_size

    def may_leave(self, rank: int, seconds: float) -> bool:
        """Return whether the store's holder may end it; after a verdict it waits LINGER_SECONDS for missing ranks."""
        unaware = frozenset(range(self.world_size)) - self.heard - self.ended - self.gone - {rank}
        if seconds >= limits.LINGER_SECONDS and self.verdict:
            unaware &= self.alive
        return not unaware


def after(state: JobState, events: Iterable[Sequence[Any]], *, now: float) -> JobState:
    """Return the state after these events of the log, read at this time."""
    for name, same in groupby(events, key=itemgetter(0)):
        if name in _SETS:  # all at once: each new set is a copy, and all ranks answer together
            ranks = frozenset(rank for _, rank, *_ in same) - (state.crashed if name == "alive" else NONE)
            state = replace(state, **{name: getattr(state, name) | ranks})
        else:
            for _, rank, *facts in same:
                state = _TRANSITIONS[name](state, rank, facts, now)
    return state


def answer(state: JobState, rank: int, *, now: float, is_waiting: bool, is_watching: bool = False) -> Event | None:
    """Return the event that a rank must append now, or None.

    is_waiting: it waits for others in an operation. After a rank failure all ranks answer. After a time limit only
    waiting ranks do, because a rank that does not wait is the missing one. is_watching: it also reports processes that
    have ended.
    """
    if state.verdict:
        return None if rank in state.heard else ("heard", rank)
    if not state.cause:
        return ("failed", rank, LOST) if is_watching and state.vanished - {rank} else None
    if rank in state.crashed:
        return None
    if rank not in state.alive:
        return ("alive", rank) if is_waiting or state.cause == LOST else None
    lost = _count(state, rank, now)
    return None if lost is None else ("verdict", rank, tuple(sorted(lost)))


def _count(state: JobState, rank: int, now: float) -> frozenset[int] | None:
    """Return the lost ranks if this rank must publish them, else None. If the caller publishes none, any rank does."""
    if state.caller is None:
        return None
    seconds = now - state.called_at
    if state.caller == rank or state.caller in state.gone:
        awaited = state.missing - state.gone - state.crashed
        limit = limits.ANSWER_SECONDS if awaited <= state.late else limits.ROLL_CALL_SECONDS
        return state.missing if not awaited or seconds >= limit else None
    return state.missing | {state.caller} if seconds >= limits.ROLL_CALL_SECONDS + limits.LINGER_SECONDS else None


def _failed(state: JobState, rank: int, facts: Sequence[Any], now: float) -> JobState:
    if state.caller is None:
        state = replace(state, caller=rank, called_at=now)
    if not state.cause:
        state = replace(state, cause=facts[0], since=now)
    return replace(state, alive=state.alive | {rank})


def _crashed(state: JobState, rank: int, facts: Sequence[Any], now: float) -> JobState:
    if not state.cause:
        state = replace(state, cause=LOST, since=now, exit_code=facts[0])
    return replace(state, crashed=state.crashed | {rank})


def _with_verdict(state: JobState, rank: int, facts: Sequence[Any], now: float) -> JobState:
    return state if state.verdict else replace(state, verdict=Verdict(frozenset(facts[0]), facts[1], state.since))


def _waits(state: JobState, rank: int, facts: Sequence[Any], now: float) -> JobState:
    number, label, ranks = facts
    ranks = frozenset(range(state.world_size) if ranks is None else ranks)
    known = state.stall(number) or Stall(number, label, NONE, NONE)
    # a union of ranks, because groups use the same operation numbers
    stall = replace(known, ranks=known.ranks | ranks, waiting=known.waiting | {rank})
    others = [each for each in state.stalls if each.number != number]
    return replace(state, stalls=(*others, stall)[-MAX_STALLS:])


_SETS = ("alive", "heard", "ended")
"""Events by which a rank joins the set of that name."""
_TRANSITIONS: Mapping[str, Callable[[JobState, int, Sequence[Any], float], JobState]] = {
    "failed": _failed,
    "crashed": _crashed,
    "verdict": _with_verdict,
    "left": lambda state, rank, facts, now: replace(state, left={**state.left, rank: facts[0]}),
    "waits": _waits,
    "flight": lambda state, rank, facts, now: replace(state, flights={**state.flights, rank: facts[0]}),
}


def describe(state: JobState, lost: Iterable[int], name: Callable[[Iterable[int]], str]) -> str:
    """Return a verdict's text. name: formats ranks."""
    mute = [rank for rank in lost if rank == state.caller and rank not in state.missing]
    silent = [rank for rank in lost if rank not in mute]
    text = f"no answer from {name(silent)}" if silent else "all ranks still answer"
    return f"{text}, and no verdict from {name(mute)}, which counted the answers" if mute else text
