"""Parse a dump of torch's flight recorder: the collectives and messages of one rank, from JSON or a pickle.

Does not import torch: dumps are also read on login nodes.
"""

import io
import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, cast

from bigbatch.files import parse_json

MESSAGE = re.compile(r"(send|recv) (\d+)(?:->|<-)(\d+)$")
"""Matches 'nccl:send 0->1' and 'nccl:recv 1<-0': kind, own number and peer's number in the group."""
MAX_NUMBERS = 1 << 20
"""Most ranks, tensor sizes and types in a dump, plus two per byte of it: a pickle can refer to one list many times."""
_PLAIN = re.compile(
    rb"(?:"
    rb"[N\x88\x89(\]})tlaesud\x85-\x87\x94]"  # None, bools; marks, lists, dicts, tuples; memoize
    rb"|\x80."  # protocol
    rb"|[Kqh].|M..|J....|G.{8}"  # memo: get, put; integers of 1, 2 and 4 bytes; a float
    rb"|j..[\x00-\x3f]\x00|r..[\x00-\x3f]\x00"  # memo with indexes below 1 << 22: a put allocates up to its index
    rb"|\x8a(?:\x00|\x01.|\x02..|\x03...|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8}|\x09.{9})"  # longer integers
    rb"|\x95.{8}"  # frame
    rb")*",
    re.S,
)
_TEXTS = {ord("X"): 4, 0x8C: 1}
"""Opcode of a text -> size of its length field in bytes."""
_PROTOCOL, _STOP = b"\x80", ord(".")
_CALLS = b"cibBoRQP\x81\x82\x83\x84\x92\x93"
"""Opcodes that import, build or call objects."""


@dataclass(frozen=True, eq=False)
class ProcessGroup:
    """A process group and its global ranks; no ranks if torch does not state them."""

    name: str
    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """A collective, a message, or a coalesced batch of either (in parts), as one rank recorded it."""

    group: ProcessGroup
    number: int
    """Number of the collective in its group; of a message: its number among this rank's messages in the group."""
    name: str
    sizes: tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]] = ((), ())
    """Sizes of all inputs, and of all outputs."""
    types: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    state: str = "scheduled"
    """scheduled, started or completed; gloo's operations stay scheduled."""
    is_over: bool = False
    is_message: bool = False
    order: int = 0
    """Index among all operations of the rank, including those that the recorder has dropped."""
    frames: Sequence[Mapping[str, Any]] = field(default=(), compare=False, repr=False)
    """Call stack, innermost first; kept for pending operations and each group's last one; none in JSON."""
    parts: tuple["Operation", ...] = ()

    @property
    def kind(self) -> str:
        """Return the name without the library, such as all_reduce or send."""
        return self.name.partition(":")[2].partition(" ")[0] or self.name


@dataclass(frozen=True)
class Recording:
    """The operations of one rank, in order; the recorder drops the oldest ones."""

    groups: Mapping[str, ProcessGroup]
    operations: tuple[Operation, ...]

    @property
    def collectives(self) -> Iterable[Operation]:
        """Return the collectives, without point-to-point messages, which each rank numbers separately."""
        return (each for each in self.operations if not each.is_message)

    @property
    def waiting(self) -> Operation | None:
        """Return the first operation that is not over."""
        return next((each for each in self.operations if not each.is_over), None)

    @property
    def is_whole(self) -> bool:
        """Return whether the recorder has dropped nothing."""
        first = next((each for all in self.operations[:1] for each in (*all.parts, all)), None)
        return first is None or first.order == 0


def late_for(number: int, ranks: Iterable[int], begun: Mapping[int, int]) -> tuple[dict[int, int], list[int]]:
    """Return the ranks that have not begun collective `number`, with their last number; and the unknown ranks.

    begun: rank -> number of the last collective that it has begun in that group, 0 for none.
    """
    known = {rank: begun[rank] for rank in ranks if rank in begun}
    return {rank: last for rank, last in known.items() if last < number}, [each for each in ranks if each not in begun]


def read_recording(data: bytes) -> Recording:
    """Parse a dump, in JSON or pickled, without executing code.

    Raises: ValueError, LookupError, TypeError or AttributeError if it is not a dump.
    """
    dump = parse_json(data) if data.lstrip()[:1] in (b"{", b"[") else load_plain(data)
    if not isinstance(dump, dict) or not {"entries", "pg_config"} & dump.keys():
        raise ValueError("it is not a dump of torch's flight recorder")
    reader = _Reader(left=MAX_NUMBERS + 2 * len(data))
    groups = {
        str(name): reader.add_group(str(name), entry) for name, entry in dict(dump.get("pg_config") or {}).items()
    }
    for entry in dump.get("entries") or ():  # JSON dumps have no list if there are no entries
        reader.add(entry)
    return Recording(groups, reader.finish())


def _whole(value: Any, *, least: int = -(1 << 63), most: int = 1 << 63) -> int:
    """Return a number of a dump. Raises: ValueError, also for one that no recorder writes; TypeError."""
    try:
        number = int(value)
    except OverflowError:  # an infinite float
        number = most
    if not least <= number < most:
        raise ValueError(f"it has a number that no recorder writes, {str(value)[:40]}")
    return number


class _Reader:
    """Collects entries; the entry that ends a coalesced batch replaces the entries of its parts."""

    def __init__(self, *, left: int) -> None:
        self._groups: dict[str, ProcessGroup] = {}
        self._left = left
        self._operations: dict[int, Operation] = {}
        self._frames: dict[int, Sequence[Mapping[str, Any]]] = {}
        self._same: dict[Any, Any] = {}
        """Value -> the stored one: equal values are stored once, because dumps of a thousand ranks are compared."""
        self._latest: dict[tuple[str, bool], list[int]] = {}
        """(Group name, whether messages) -> keys of the last operations, which have the same number."""

    def add_group(self, name: str, entry: Mapping[str, Any]) -> ProcessGroup:
        ranks = entry.get("ranks", ())
        ranks = parse_json(ranks) if isinstance(ranks, str) else ranks
        self._take(len(ranks))
        group = ProcessGroup(
            name, str(entry.get("desc", "")), tuple(_whole(each, least=0, most=1 << 32) for each in ranks)
        )
        self._groups[name] = group
        return group

    def _take(self, count: int) -> None:
        """Count numbers and texts of the dump. Raises: ValueError if there are more than a recorder writes."""
        self._left -= count
        if self._left < 0:
            raise ValueError("it names more ranks, sizes or types than a recorder does")

    def add(self, entry: Mapping[str, Any]) -> None:
        """Add the next entry, in any version of the format."""
        name, description, *_ = (*map(str, entry["process_group"]), "")
        group = self._groups.setdefault(name, ProcessGroup(name, description, ()))
        title, state = str(entry["profiling_name"]), str(entry["state"])
        is_message = bool(entry.get("is_p2p", MESSAGE.search(title)))
        operation = Operation(
            group,
            _number(entry, is_message=is_message),
            title,
            (self._sizes(entry.get("input_sizes")), self._sizes(entry.get("output_sizes"))),
            (self._types(entry.get("input_dtypes")), self._types(entry.get("output_dtypes"))),
            state,
            # gloo records no state; other operations that are retired but not completed have timed out
            state == "completed" or (title.startswith("gloo:") and bool(entry.get("retired"))),
            is_message,
            _whole(entry.get("record_id", len(self._frames))),
        )
        if operation.kind == "coalesced" and not is_message:
            # some releases record the end of a batch of messages as a collective
            before = self._operations_of((name, True))
            if before and before[-1].order == operation.order - 1 and not before[-1].parts:
                operation = replace(operation, is_message=True, number=before[-1].number)
        self._keep(operation, [each for each in entry.get("frames") or () if isinstance(each, Mapping)])

    def finish(self) -> tuple[Operation, ...]:
        """Return all operations in order. An operation is over if a later one of its group is, except with gloo.

        A group runs its collectives in order, and also the messages of one direction between two ranks.
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
            # a new group of the same name counts from the start
            self._operations = {k: each for k, each in self._operations.items() if each.group.name != line[0]}
            self._latest = {key: keys for key, keys in self._latest.items() if key[0] != line[0]}
            latest = []
        if not latest or latest[-1].number != operation.number:
            self._latest[line] = latest_keys = []
        else:
            latest_keys = self._latest[line]
            if operation.kind.endswith("coalesced"):  # the recorder keeps no states of the parts
                operation = replace(operation, parts=tuple(latest))
                for key in latest_keys:
                    del self._operations[key]
                latest_keys.clear()
        key = len(self._frames)
        self._frames[key], self._operations[key] = frames, operation
        latest_keys.append(key)

    def _operations_of(self, line: tuple[str, bool]) -> list[Operation]:
        return [self._operations[key] for key in self._latest.get(line, ())]

    def _sizes(self, sizes_by_tensor: Sequence[Sequence[int]] | None) -> tuple[tuple[int, ...], ...]:
        sizes_by_tensor = sizes_by_tensor or ()
        self._take(len(sizes_by_tensor) + sum(map(len, sizes_by_tensor)))
        sizes = tuple(tuple(map(_whole, each)) for each in sizes_by_tensor)
        return cast(tuple[tuple[int, ...], ...], self._same.setdefault(sizes, sizes))

    def _types(self, names: Sequence[str] | str | None) -> tuple[str, ...]:
        self._take(0 if isinstance(names, str) else len(names or ()))
        types = (names,) if isinstance(names, str) else tuple(map(str, names or ()))
        return cast(tuple[str, ...], self._same.setdefault(types, types))


def _number(entry: Mapping[str, Any], *, is_message: bool) -> int:
    key = "p2p_seq_id" if is_message else "collective_seq_id"
    return _whole(entry[key] if key in entry else entry["seq_id"])  # before version 2.0 there was one number for both


class NotPlain(ValueError):
    """The bytes are not a pickle of plain data; the message says what they are."""


class RunsCode(NotPlain):
    """Reading the pickle would have called functions."""


def load_plain(data: bytes) -> Any:
    """Read a pickle of dicts, lists, tuples, texts, numbers, bools and None. Raises: NotPlain.

    All opcodes are checked before any is executed.
    """
    _check(data)
    try:
        return _Unpickler(io.BytesIO(data)).load()
    except Exception as error:  # damaged bytes raise almost anything
        raise NotPlain(f"it is damaged: {str(error) or type(error).__name__}") from None


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _check(data: bytes) -> None:
    """Check all opcodes up to STOP. Raises: NotPlain for one that makes anything but plain data."""
    if data[:1] != _PROTOCOL:
        raise NotPlain("it is not a pickle" if data else "it is empty")
    at = 0
    while True:
        run = _PLAIN.match(data, at)
        at = run.end() if run else at
        if at >= len(data):
            raise NotPlain("it is cut off")
        operation = data[at]
        if operation == _STOP:
            return
        if operation in _CALLS:
            raise RunsCode("reading it would run code, and only data is expected")
        if operation not in _TEXTS:
            raise NotPlain("it holds more than plain data, or is cut off")
        start = at + 1 + _TEXTS[operation]
        at = start + int.from_bytes(data[at + 1 : start], "little")
