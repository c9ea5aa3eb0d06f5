"""Read each key's type, default, legal numbers and the choices it applies to from the fields of its section."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from bigbatch.trainer.config.strict_yaml import Ambiguous


@dataclass(frozen=True)
class Range:
    """Legal numbers of a field, alone or in a tuple; null is legal if the field's type allows it."""

    legal: str
    holds: Callable[[float], bool]


POSITIVE = Range("positive and at most 3.4e38", lambda v: 0 < v <= 3.4e38)  # fp32 holds no larger number
NOT_NEGATIVE = Range("0 or more, and at most 1e9", lambda v: 0 <= v <= 1e9)
DECAY = Range("0 or more, and at most 1000", lambda v: 0 <= v <= 1000)  # with a larger one no weight is learned
COUNT = Range("positive and at most 1e9", lambda v: 0 < v <= 1e9)  # whole numbers, and seconds: more overflow clocks
UP_TO_4096 = Range("positive and at most 4096", lambda v: 0 < v <= 4096)  # libgomp crashes with some ten thousand
SHARE = Range("at least 0 and at most 1", lambda v: 0 <= v <= 1)
ABOVE_ZERO = Range("above 0 and at most 1", lambda v: 0 < v <= 1)
BELOW_ONE = Range("at least 0 and below 1", lambda v: 0 <= v < 1)
MEGAPIXELS = Range("above 0 and at most 178", lambda v: 0 < v <= 178)  # Pillow opens none with more than 178.9
BELOW_2_63 = Range("0 or more, and below 2**63", lambda v: 0 <= v < 2**63)
PATH = "path"
"""Marks a field that holds a path, or may hold one."""


@dataclass(frozen=True)
class OnlyFor:
    """Limits a key to some values of another key of its section: with other values it must be off, see Key.off.

    With those values it must not be null, unless or_null. or_own: it may also be stated with an import path.
    """

    decider: str
    values: tuple[str, ...]
    or_null: bool = False
    or_own: bool = False

    def applies(self, decided: object) -> bool:
        """Return whether the key has a meaning if the other key has this value."""
        return decided in self.values or (self.or_own and isinstance(decided, str) and "." in decided)


@dataclass(frozen=True, kw_only=True)
class Key:
    """Describes one key of an experiment, as its field states it."""

    section: str
    name: str
    kind: Any
    """Its type."""
    default: Any
    ranges: tuple[Range, ...]
    only_for: OnlyFor | None
    is_path: bool

    def __str__(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def off(self) -> Any:
        """Return its value if it has no meaning: null, or the default of a key that is never null."""
        return None if NoneType in get_args(self.kind) else self.default

    @property
    def decider(self) -> str:
        """Return the dotted key that decides whether this one has a meaning; empty if it always has one."""
        return "" if self.only_for is None else f"{self.section}.{self.only_for.decider}"


def read_keys(section: str, holder: type) -> Iterator[Key]:
    """Yield the keys of a section from its dataclass, in order."""
    hints = get_type_hints(holder, include_extras=True)
    for field in fields(holder):
        hint = hints[field.name]
        kind, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        yield Key(
            section=section,
            name=field.name,
            kind=kind,
            default=field.default,
            ranges=tuple(note for note in notes if isinstance(note, Range)),
            only_for=next((note for note in notes if isinstance(note, OnlyFor)), None),
            is_path=PATH in notes,
        )


def conform(value: Any, kind: Any) -> Any:
    """Convert a value to a field's type: whole numbers to floats, lists to tuples. Raises: TypeError."""
    outer, inner = get_origin(kind), get_args(kind)
    if outer in (Union, UnionType):
        if value is None and NoneType in inner:
            return None
        *others, last = (each for each in inner if each is not NoneType)
        for each in others:
            with suppress(TypeError):
                return conform(value, each)
        return conform(value, last)
    if outer is Literal and isinstance(value, str) and value in inner:
        return str(value)
    if outer is tuple and isinstance(value, list | tuple):
        kinds = inner[:1] * len(value) if inner[-1] is Ellipsis else inner
        if len(kinds) == len(value):
            return tuple(map(conform, value, kinds))
    if outer is dict and isinstance(value, dict) and not any(ambiguous(value)):
        return value
    # float() of a larger one may overflow; type() excludes bool
    if kind is float and type(value) is int and abs(value) < 2**1023:
        return float(value)
    if kind is str and isinstance(value, str):
        return str(value)
    if type(value) is kind:
        return value
    raise TypeError(f"{value!r} is not {describe(kind)}")


def ambiguous(value: Any) -> Iterator[str]:
    """Yield each Ambiguous text in a dict or list, whose values no type checks."""
    if isinstance(value, Ambiguous):
        yield value
    for each in (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from ambiguous(each)


def takes_text(kind: Any) -> bool:
    return kind is str or (get_origin(kind) in (Union, UnionType) and str in get_args(kind))


def describe(kind: Any) -> str:
    """Describe a type, such as: int or null; one of 'a', 'b'; [float, float] for a list."""
    outer, inner = get_origin(kind), get_args(kind)
    if outer in (Union, UnionType):
        number = "a whole number" if any(get_origin(each) is Literal for each in inner) else "int"
        return " or ".join(number if each is int else describe(each) for each in inner)
    if outer is Literal:
        return "one of " + ", ".join(map(repr, inner))
    if outer is tuple and inner[-1] is Ellipsis and get_origin(inner[0]) is Literal:
        return "a list of " + ", ".join(map(repr, get_args(inner[0])))
    if outer is tuple:
        return f"[{', '.join('...' if each is Ellipsis else describe(each) for each in inner)}]"
    return "null" if kind is NoneType else inspect.formatannotation(kind).replace("typing.", "")
