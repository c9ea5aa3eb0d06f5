"""What torch's flight recorder kept of one rank: its collectives and messages, read from a dump in either form.

Knows no torch: dumps are looked at where jobs are submitted, too.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from bigbatch.comm.rendezvous.plain_pickle import load_plain
from bigbatch.files import parse_json

MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)$")
"""Matches 'nccl:send 0->1' and 'nccl:recv 1<-0': kind, own number and peer's number in the group."""
MOST_NUMBERS = 1 << 20
"""Sizes that a dump may hold besides those that its length accounts for: a pickle can refer to one list many times."""


@dataclass(frozen=True, eq=False)
class Group:
    """A process group, whose ranks are those of the job; without ranks where torch does not tell them."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective, a message, or a batch of either, as one rank recorded it; where it is a batch, parts has all."""

    group: Group
    number: int
    """Counted from the group's first collective; of messages: from this rank's first message in the group."""
    name: str
    sizes: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]] = ((), ())
    """Sizes of all inputs, and of all outputs."""
    types: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    state: str = "scheduled"
    """scheduled, started or completed, as the recorder found it; gloo's stay scheduled."""
    is_over: bool = False
    is_message: bool = False
    order: int = 0
    """Its place among all that the rank began, those included that the recorder has forgotten."""
    frames: Sequence[Mapping[str, Any]] = field(default=(), compare=False, repr=False)
    """Where it was called, the innermost first: of what is not over, and of each group's last; none in JSON."""
    parts: tuple["Operation", ...] = ()

    @property
    def kind(self) -> str:
        """Its name without the library's, such as all_reduce or send."""
        return self.name.partition(":")[2].partition(" ")[0] or self.name


@dataclass(frozen=True)
class Recording:
    """What one rank began, in its order; the recorder has forgotten what came before."""

    groups: Mapping[str, Group]
    operations: tuple[Operation, ...]

    @property
    def collectives(self) -> Iterable[Operation]:
        """Return its collectives, without messages between two ranks, which each rank counts for itself."""
        return (each for each in self.operations if not each.is_message)

    @property
    def waiting(self) -> Operation | None:
        """Return the first operation that is not over."""
        return next((each for each in self.operations if not each.is_over), None)

    @property
    def is_whole(self) -> bool:
        """Tell whether the recorder has forgotten nothing."""
        first = next((each for all in self.operations[:1] for each in (*all.parts, all)), None)
        return first is None or first.order == 0


def late_for(number: int, ranks: Iterable[int], begun: Mapping[int, int]) -> tuple[dict[int, int], list[int]]:
    """Compare ranks: who has not begun collective `number` -> what they have begun last; and of whom nothing is known.

    begun: rank -> number of the last collective that it has begun in that group, 0 for none.
    """
    known = {rank: begun[rank] for rank in ranks if rank in begun}
    return {rank: last for rank, last in known.items() if last < number}, [each for each in ranks if each not in begun]


def read_recording(data: bytes) -> Recording:
    """Read a dump in JSON, or pickled, which runs no code.

    Raises: ValueError, LookupError, TypeError or AttributeError where it is none.
    """
    if data.lstrip()[:1] in (b"{", b"["):
        try:
            dump = parse_json(data)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    else:
        dump = load_plain(data)
    if not isinstance(dump, dict) or not {"entries", "pg_config"} & dump.keys():
        raise ValueError("it is no dump of torch's flight recorder")
    groups = {str(name): _group(str(name), told) for name, told in dict(dump.get("pg_config") or {}).items()}
    reader = _Reader(groups, left=MOST_NUMBERS + 2 * len(data))
    for entry in dump.get("entries") or ():  # in JSON there is no list for none
        reader.add(entry)
    return Recording(groups, reader.finish())


def _group(name: str, told: Mapping[str, Any]) -> Group:
    ranks = told.get("ranks", ())
    ranks = parse_json(ranks) if isinstance(ranks, str) else ranks
    return Group(name, str(told.get("desc", "")), tuple(int(rank) for rank in ranks))


class _Reader:
    """Takes entries one by one; what ends a batch takes the entries of its parts into itself."""

    def __init__(self, groups: Mapping[str, Group], *, left: int) -> None:
        self._groups, self._left = dict(groups), left
        self._operations: dict[int, Operation] = {}
        self._frames: dict[int, Sequence[Mapping[str, Any]]] = {}
        self._same: dict[Any, Any] = {}
        """Equal values are kept once: a thousand ranks are compared at a time."""
        self._latest: dict[tuple[str, bool], list[int]] = {}
        """Group's name, and whether of messages -> keys of the last operations that have one number."""

    def add(self, entry: Mapping[str, Any]) -> None:
        """Take the next entry, of any version of the format."""
        name, description, *_ = (*map(str, entry["process_group"]), "")
        group = self._groups.setdefault(name, Group(name, description, ()))
        title, state = str(entry["profiling_name"]), str(entry["state"])
        is_message = bool(entry.get("is_p2p", MESSAGE.search(title)))
        operation = Operation(
            group,
            _number(entry, is_message=is_message),
            title,
            (self._sizes(entry.get("input_sizes")), self._sizes(entry.get("output_sizes"))),
            (self._types(entry.get("input_dtypes")), self._types(entry.get("output_dtypes"))),
            state,
            # gloo's have no state; others that are retired and not completed have timed out
            state == "completed" or (title.startswith("gloo:") and bool(entry.get("retired"))),
            is_message,
            int(entry.get("record_id", len(self._frames))),
        )
        if operation.kind == "coalesced" and not is_message:
            # some releases call the end of a batch of messages a collective
            before = self._operations_of((name, True))
            if before and before[-1].order == operation.order - 1 and not before[-1].parts:
                operation = replace(operation, is_message=True, number=before[-1].number)
        self._keep(operation, entry.get("frames") or ())

    def finish(self) -> tuple[Operation, ...]:
        """Return all in order. What others of its group have come after is over, but with gloo.

        A group runs one collective after the other, as do messages of one direction between two ranks.
        """
        passed: set[tuple[str, str]] = set()
        lines: set[tuple[str, str]] = set()
        finished = []
        for key, each in reversed(self._operations.items()):
            line = (each.group.name, each.name if each.is_message else "")
            is_over = each.is_over or (line in passed and not (each.is_message and each.parts))
            if is_over and not each.name.startswith("gloo:"):
                passed.add(line)
            if is_over != each.is_over:
                each = replace(each, is_over=is_over)
            if not is_over or line not in lines:
                each = replace(each, frames=self._frames[key])
            lines.add(line)
            finished.append(each)
        return tuple(reversed(finished))

    def _keep(self, operation: Operation, frames: Sequence[Mapping[str, Any]]) -> None:
        line = (operation.group.name, operation.is_message)
        latest = self._operations_of(line)
        if latest and operation.number < latest[-1].number and not operation.is_message:
            # a group of that name was made anew, and counts from the start
            self._operations = {k: each for k, each in self._operations.items() if each.group.name != line[0]}
            self._latest = {key: keys for key, keys in self._latest.items() if key[0] != line[0]}
            latest = []
        if not latest or latest[-1].number != operation.number:
            self._latest[line] = latest_keys = []
        else:
            latest_keys = self._latest[line]
            if operation.kind.endswith("coalesced"):  # of the parts' own states the recorder keeps none
                operation = replace(operation, parts=tuple(latest))
                for key in latest_keys:
                    del self._operations[key]
                latest_keys.clear()
        key = len(self._frames)
        self._frames[key], self._operations[key] = frames, operation
        latest_keys.append(key)

    def _operations_of(self, line: tuple[str, bool]) -> list[Operation]:
        return [self._operations[key] for key in self._latest.get(line, ())]

    def _sizes(self, told: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
        told = told or ()
        self._left -= len(told) + sum(map(len, told))
        if self._left < 0:
            raise ValueError("it names more sizes than a recorder does")
        sizes = tuple(tuple(map(int, each)) for each in told)
        return cast(tuple[tuple[int, ...], ...], self._same.setdefault(sizes, sizes))

    def _types(self, told: Sequence[str] | str | None) -> tuple[str, ...]:
        types = (told,) if isinstance(told, str) else tuple(map(str, told or ()))
        return cast(tuple[str, ...], self._same.setdefault(types, types))


def _number(entry: Mapping[str, Any], *, is_message: bool) -> int:
    key = "p2p_seq_id" if is_message else "collective_seq_id"
    return int(entry[key] if key in entry else entry["seq_id"])  # before version 2.0 there was one for both
