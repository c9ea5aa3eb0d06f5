"""Find the ranks that all others wait for, from the flight recorders of a job that hangs."""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from bigbatch.comm.rendezvous.recording import Operation, ProcessGroup, Recording, late_for
from bigbatch.tools.explain.recorded_job import RecordedJob

ABSENT, DIFFERS, CYCLE, LATE, UNSTARTED, HELD, STUCK, UNEVEN = KINDS = (
    "left no dump",
    "differs",
    "wait for each other",
    "has not begun",
    "has not started",
    "has not completed",
    "all have begun",
    "has begun less",
)
"""Kinds of findings; a kind that explains others comes first."""

OWN_INPUTS, OWN_OUTPUTS = ("scatter",), ("gather",)
"""Collectives in which the root's inputs, or outputs, differ from the others'; in all_to_all any may differ."""


@dataclass(frozen=True)
class Culprit:
    """A cause of the hang: the ranks, what is wrong with them, and the operation that shows it."""

    kind: str
    ranks: tuple[int, ...]
    group: ProcessGroup | None = None
    operation: Operation | None = None
    """The operation as recorded by a rank that is not to blame."""
    waiting: tuple[int, ...] = ()
    """Ranks that wait in it, or have completed it."""
    theirs: Mapping[int, Operation] = field(default_factory=dict)
    """The operation that each of the ranks calls instead, or waits in."""


@dataclass(frozen=True)
class _Place:
    """Place of an operation: a collective of all ranks of a group, or the messages of one rank."""

    group: ProcessGroup
    number: int
    of_rank: int | None = None


@dataclass(frozen=True)
class _Cause:
    """Why an operation does not end: what is wrong, and with which ranks."""

    kind: str
    ranks: frozenset[int]
    place: _Place


def find_culprits(recordings: Mapping[int, Recording]) -> tuple[RecordedJob, list[Culprit]]:
    """Compare recordings; return the job and its findings, the likeliest cause first; none if all ranks agree.

    A waiting rank is not a culprit if the rank that it waits for waits, too: the chain is followed to its end.
    """
    job = RecordedJob(recordings)
    search = _Search(job)
    found = [*search.absent(), *search.differing(), *search.ends()]
    if not found:
        found = search.uneven()
    unlike = {(each.kind, each.group, each.ranks): each for each in reversed(found)}  # both searches may find one
    return job, sorted(unlike.values(), key=lambda each: KINDS.index(each.kind))


class _Search:
    """Follows the waits between ranks, from the first operation that each rank has not ended."""

    def __init__(self, job: RecordedJob) -> None:
        self._job = job
        self._cause_of_collective = cache(self._judge_collective)
        self._causes = {rank: self._cause(rank, operation) for rank, operation in job.waiting.items()}
        self._waits = {rank: self._waits_for(rank) for rank in job.waiting}

    def absent(self) -> list[Culprit]:
        gone = frozenset(self._job.ranks) - self._job.recordings.keys()
        if not gone:
            return []
        places = Counter(cause.place for cause in self._causes.values() if cause.kind == LATE and cause.ranks & gone)
        if not places:
            return [Culprit(ABSENT, tuple(sorted(gone)))]
        return [self._finding(ABSENT, gone, places.most_common(1)[0][0])]

    def differing(self) -> list[Culprit]:
        """Return for each group the first collective that ranks call differently, ended or not."""
        found = []
        for group, numbers in self._job.collectives.items():
            for number in sorted(numbers):
                if odd := self._minority(group, number):
                    found.append(self._finding(DIFFERS, odd, _Place(group, number)))
                    break
        return found

    def ends(self) -> list[Culprit]:
        """Return the ranks at the ends of all chains, which wait for no other, and one circle of ranks, if any."""
        nodes = self._waits.keys() | frozenset().union(*self._waits.values())
        ends = {rank for rank in nodes if not self._waits.get(rank)}
        grouped: dict[tuple[str, _Place], set[int]] = defaultdict(set)
        for rank in sorted(ends & self._job.recordings.keys()):
            cause = self._causes.get(rank) or self._earliest(rank)
            grouped[cause.kind, cause.place] |= cause.ranks if cause.kind == DIFFERS else {rank}
        if circle := self._circle(nodes, ends):
            causes = {self._causes[rank] for rank in circle}
            is_one = all(each.place.of_rank is not None for each in causes) or len(causes) == 1
            kind = STUCK if is_one and all(each.kind == STUCK for each in causes) else CYCLE
            grouped[kind, self._causes[min(circle)].place].update(circle)
        return [self._finding(kind, ranks, place) for (kind, place), ranks in grouped.items()]

    def uneven(self) -> list[Culprit]:
        """Return, if no rank waits, the ranks that have begun fewer collectives of a group than others."""
        found = []
        for group, begun in self._job.begun.items():
            begun = {rank: 0 for rank in group.ranks if self._is_whole(rank)} | begun
            most, least = max(begun.values()), min(begun.values())
            if least < most:
                behind = frozenset(rank for rank, last in begun.items() if last == least)
                following = min(each for each in self._job.collectives[group] if each > least)
                found.append(self._finding(UNEVEN, behind, _Place(group, following)))
        return found

    def _minority(self, group: ProcessGroup, number: int) -> frozenset[int]:
        """Return the ranks of a group that call another collective than most.

        If no call has a majority, as in a group of two, the calls of that number in groups of the same kind decide.
        """
        odd = _minority(self._job.collectives[group][number])
        if odd != self._job.collectives[group][number].keys():
            return odd
        kind = (group.description, len(group.ranks))
        others = {
            rank: call
            for other, numbers in self._job.collectives.items()
            if other != group and (other.description, len(other.ranks)) == kind
            for rank, call in numbers.get(number, {}).items()
        }
        among_all = (
            _minority(others | self._job.collectives[group][number])
            if others and not _minority(others)
            else frozenset()
        )
        return odd & among_all or odd

    def _is_whole(self, rank: int) -> bool:
        return rank in self._job.recordings and self._job.recordings[rank].is_whole

    def _waits_for(self, rank: int) -> frozenset[int]:
        """Return the ranks that a rank waits for in its first unended operation; empty if it is to blame itself.

        If it is itself a cause there, it waits only for those causes that are held up in another operation first.
        """
        cause = self._causes[rank]
        if cause.kind == LATE or rank not in cause.ranks:
            return cause.ranks - {rank}
        if cause.kind == DIFFERS:
            return frozenset()
        return frozenset(each for each in cause.ranks if self._causes[each].place != cause.place)

    def _cause(self, rank: int, operation: Operation) -> _Cause:
        group = self._job.group_of(rank, operation)
        if operation.is_message:
            return self._cause_of_messages(rank, group, operation)
        return self._cause_of_collective(_Place(group, operation.number))

    def _judge_collective(self, place: _Place) -> _Cause:
        group, number = place.group, place.number
        begun = {rank: -1 for rank in group.ranks if rank in self._job.recordings} | self._job.begun[group]
        late, unknown = late_for(number, group.ranks, begun)
        if late or unknown:
            return _Cause(LATE, frozenset([*late, *unknown]), place)
        calls = self._job.collectives[group][number]
        pending = frozenset(rank for rank, each in calls.items() if not each.is_over)
        if odd := self._minority(group, number):
            return _Cause(DIFFERS, odd, place)
        unstarted = frozenset(rank for rank in pending if calls[rank].state == "scheduled")
        if unstarted and unstarted != pending:
            return _Cause(UNSTARTED, unstarted, place)
        if pending != frozenset(group.ranks):
            return _Cause(HELD, pending, place)
        if odd := _minority(calls, is_exact=True):
            return _Cause(DIFFERS, odd, place)
        return _Cause(STUCK, pending, place)

    def _cause_of_messages(self, rank: int, group: ProcessGroup, operation: Operation) -> _Cause:
        place = _Place(group, operation.number, rank)
        peers, unlike, unposted, unstarted = set(), set(), set(), set()
        for message, peer in self._job.peers_of(rank, operation):
            partner, of = self._partner(rank, group, message, peer)
            if partner is None or of is None:
                unposted.add(peer)
            elif _amount(message) != _amount(partner):
                unlike |= {rank, peer}
            elif not of.is_over:
                peers.add(peer)
                if {of.state, operation.state} == {"scheduled", "started"}:
                    unstarted.add(peer if of.state == "scheduled" else rank)
        for kind, ranks in ((LATE, unposted), (DIFFERS, unlike), (UNSTARTED, unstarted), (STUCK, peers)):
            if ranks:
                return _Cause(kind, frozenset(ranks), place)
        return _Cause(HELD, frozenset([rank]), place)

    def _partner(
        self, rank: int, group: ProcessGroup, message: Operation, peer: int
    ) -> tuple[Operation, Operation] | tuple[None, None]:
        """Return the peer's matching message and its batch, or (None, None); both sides post in the same order."""
        mine = self._job.messages[rank, group, message.kind, peer]
        theirs = self._job.messages[peer, group, "recv" if message.kind == "send" else "send", rank]
        if not (self._is_whole(rank) and self._is_whole(peer)):
            mine, theirs = ([each for each in some if not each[1].is_over] for some in (mine, theirs))
        place = next(k for k, (each, _) in enumerate(mine) if each is message)
        return theirs[place] if place < len(theirs) else (None, None)

    def _earliest(self, rank: int) -> _Cause:
        """Return why others wait for a rank that does not wait: the cause whose operation comes first in the program.

        An operation comes before another one if a rank that belongs to both waits in it.
        """
        causes = [(each, cause.place) for each, cause in self._causes.items() if rank in cause.ranks]
        num_waiting = Counter(place for _, place in causes)
        num_of_others = Counter(
            place
            for each, place in causes
            for other in num_waiting
            if other != place and other.of_rank is None and each in other.group.ranks
        )
        first = max(num_waiting, key=lambda place: (num_of_others[place], num_waiting[place]))
        return next(cause for cause in self._causes.values() if cause.place == first)

    def _circle(self, nodes: Iterable[int], ends: Iterable[int]) -> list[int]:
        """Return ranks that wait for each other, without a chain to an end; empty if every rank has one.

        Of several circles, prefer one with a rank that waits for a late rank; of these, return the smallest.
        """
        open_ends = set(ends)
        while grown := {rank for rank in self._waits.keys() - open_ends if not self._waits[rank].isdisjoint(open_ends)}:
            open_ends |= grown
        left = sorted(set(nodes) - open_ends)
        circles = (_shortest_circle(rank, self._waits) for rank in left if self._causes[rank].kind == LATE)
        found = min(filter(None, circles), key=len, default=None)
        return sorted(found or next(filter(None, (_shortest_circle(rank, self._waits) for rank in left)), []))

    def _finding(self, kind: str, ranks: Iterable[int], place: _Place) -> Culprit:
        """Return the finding; of ranks late for a collective, it names only those that have begun the least."""
        if place.of_rank is None:
            calls = self._job.collectives[place.group][place.number]
        else:
            calls = {place.of_rank: self._job.waiting[place.of_rank]}
        if kind == LATE and place.of_rank is None:
            begun = {rank: self._job.begun[place.group].get(rank, -1) for rank in ranks}
            ranks = [rank for rank in begun if begun[rank] == min(begun.values())]
        ranks = tuple(sorted(ranks))
        others = [rank for rank in calls if rank not in ranks]
        example = calls[_most_common(calls, others or calls)]
        if kind == HELD and place.of_rank is None:  # also ranks whose recorders have overwritten it
            others = [rank for rank in self._job.begun[place.group] if rank not in ranks]
        doing = calls if kind == DIFFERS else self._job.waiting
        theirs = {rank: doing[rank] for rank in ranks if rank in doing}
        return Culprit(kind, ranks, place.group, example, tuple(sorted(others)), theirs)


def _shortest_circle(rank: int, waits: Mapping[int, frozenset[int]]) -> list[int]:
    """Return the shortest circle of waits through a rank, including it; empty if there is none."""
    came_from: dict[int, int] = {}
    todo = deque([rank])
    while todo:
        each = todo.popleft()
        for other in sorted(waits[each] - came_from.keys()):
            came_from[other] = each
            todo.append(other)
            if other == rank:
                circle = [each]
                while circle[-1] != rank:
                    circle.append(came_from[circle[-1]])
                return circle
    return []


def _most_common(calls: Mapping[int, Operation], ranks: Iterable[int]) -> int:
    like = Counter(_signature(calls[rank], is_exact=False) for rank in ranks)
    return max(ranks, key=lambda rank: (like[_signature(calls[rank], is_exact=False)], -rank))


def _minority(calls: Mapping[int, Operation], *, is_exact: bool = False) -> frozenset[int]:
    """Return the ranks that call another collective than most, or with other sizes or types.

    All ranks if the two most common calls are equally common. is_exact: [2, 8] also differs from [4, 4].
    """
    raw = {(each.name, each.sizes, each.types, len(each.parts)) for each in calls.values()}
    if len(raw) == 1 and not any(each.parts for each in calls.values()):
        return frozenset()
    signatures = {rank: _signature(each, is_exact=is_exact) for rank, each in calls.items()}
    (first, count), *rest = Counter(signatures.values()).most_common(2)
    if not rest:
        return frozenset()
    if rest[0][1] == count:
        return frozenset(signatures)
    return frozenset(rank for rank, each in signatures.items() if each != first)


def _signature(operation: Operation, *, is_exact: bool) -> tuple[object, ...]:
    """Return the values that must be equal on all ranks of a collective."""
    parts = tuple(_signature(each, is_exact=is_exact) for each in operation.parts)
    kind = operation.kind
    may_differ = kind.startswith("all_to_all") or kind.endswith(("_v", "_v_single"))
    facts: list[object] = []
    for sizes, types, own in zip(operation.sizes, operation.types, (OWN_INPUTS, OWN_OUTPUTS), strict=True):
        if not may_differ and kind not in own:
            facts += [sizes if is_exact else sum(map(math.prod, sizes)), frozenset(types)]
    return kind, *facts, parts


def _amount(message: Operation) -> tuple[int, frozenset[str]]:
    """Return the elements and types of a message's tensor; some releases of torch record it only as input or output."""
    inputs, outputs = message.sizes
    return sum(map(math.prod, inputs or outputs)), frozenset((*message.types[0], *message.types[1]))
