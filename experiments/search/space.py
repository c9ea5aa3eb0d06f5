"""Parse the values that a search tries, KEY=log:1:40 and so on, and shrink a range around its best value."""

import math
from dataclasses import dataclass, replace
from typing import get_args

from bigbatch.errors import ConfigError, Refusals
from bigbatch.trainer.config.kinds import is_option
from bigbatch.trainer.config.schema import KEYS, key_of, require_known
from bigbatch.trainer.config.strict_yaml import as_yaml, parse_yaml
from bigbatch.words import decimal

SHRINK = 3
"""Each round's range is the last one's (or its logarithm, if log) divided by this. Jia et al. 2018 go from coarse to
fine without stating a factor."""
EDGE_SHARE = 0.05
"""A best value within this share of a range's end may have a better one beyond it."""
MAX_DOUBLINGS = 60
NUM_DIGITS = 4
"""Digits of a sampled number; short runs cannot resolve more."""
FORMS = "KEY=log:LOW:HIGH, KEY=linear:LOW:HIGH, KEY=log2:LOW:HIGH (LOW, doubled up to HIGH) or KEY=choice:A,B,..."
SET_BY_SEARCH = (
    "run.directory",
    "run.epochs",
    "run.eval_every_epochs",
    "run.eval_offset_epochs",
    "run.resume",
    "run.seed",
)


@dataclass(frozen=True)
class SearchRange:
    key: str
    low: float
    high: float
    is_log: bool
    is_int: bool

    @property
    def ends(self) -> tuple[str, ...]:
        return self.text(self.low), self.text(self.high)

    @property
    def probes(self) -> tuple[str, ...]:
        """Return the values to check before a search: the ends, and a whole number that is no multiple of the first."""
        return (*self.ends, self.text(self.low + 1)) if self.is_int else self.ends

    def text(self, number: float) -> str:
        """Write a number as a config states it, with few digits, but never outside of the range."""
        if self.is_int:
            return str(round(number))
        return f"{min(max(float(f'{number:.{NUM_DIGITS}g}'), self.low), self.high):.12g}"

    def narrowed(self, best: str) -> "SearchRange":
        """Return a third of the range, around best and within the range."""
        low, high = self._scale(self.low), self._scale(self.high)
        width = (high - low) / SHRINK
        # pushed inwards at an edge, so that the width stays a third
        start = min(max(self._scale(float(best)) - width / 2, low), high - width)
        ends = [math.exp(end) if self.is_log else end for end in (start, start + width)]
        if self.is_int:
            ends = [round(end) for end in ends]
        return replace(self, low=max(ends[0], self.low), high=min(ends[1], self.high))

    def is_edge(self, best: str) -> bool:
        """Return whether there may be better values beyond an end."""
        low, high, here = (self._scale(number) for number in (self.low, self.high, float(best)))
        return not EDGE_SHARE <= (here - low) / (high - low) <= 1 - EDGE_SHARE

    def _scale(self, number: float) -> float:
        return math.log(number) if self.is_log else number

    def __str__(self) -> str:
        return f"{self.key} from {self.ends[0]} to {self.ends[1]}{' (log)' if self.is_log else ''}"


@dataclass(frozen=True)
class ValueList:
    """A list of values, as a config states them; is_ordered: neighbours are similar, so that it can shrink."""

    key: str
    texts: tuple[str, ...]
    is_ordered: bool

    @property
    def probes(self) -> tuple[str, ...]:
        return self.texts

    def narrowed(self, best: str) -> "ValueList":
        """Return a third of the values, around best; all of them if they have no order."""
        if not self.is_ordered:
            return self
        count = math.ceil(len(self.texts) / SHRINK)
        start = min(max(self.texts.index(best) - count // 2, 0), len(self.texts) - count)
        return replace(self, texts=self.texts[start : start + count])

    def is_edge(self, best: str) -> bool:
        """Return whether there may be better values beyond an end."""
        return self.is_ordered and len(self.texts) > 1 and best in (self.texts[0], self.texts[-1])

    def __str__(self) -> str:
        return f"{self.key} of {', '.join(self.texts)}"


Axis = SearchRange | ValueList


def parse_space(texts: tuple[str, ...]) -> tuple[Axis, ...]:
    """Parse the values of all --space options. Raises: ConfigError."""
    axes = tuple(parse_axis(text) for text in texts)
    keys = [axis.key for axis in axes]
    if not axes:
        raise ConfigError(f"--space is missing: give it once per key, as {FORMS}")
    if twice := [key for key in keys if keys.count(key) > 1]:
        raise ConfigError(f"--space names {twice[0]} twice: keep one of them")
    return axes


def parse_axis(text: str, option: str = "--space") -> Axis:
    """Parse KEY=RANGE. Raises: ConfigError naming the option, or the place in a file, and a legal form."""
    where = f"{option} {text}"
    key, _, rest = text.partition("=")
    kind, _, values = rest.partition(":")
    with (refusals := Refusals()).raise_all():
        if not is_option(key):
            require_known(key, known=tuple(KEYS), where=where, refusals=refusals)
    if key in SET_BY_SEARCH:
        raise ConfigError(f"{where}: the search itself sets {key}; leave it out")
    if kind == "choice":
        return ValueList(key, _choices(values, where), is_ordered=False)
    if kind not in ("log", "linear", "log2"):
        raise ConfigError(f"{where}: {kind!r} is not a kind of range; the forms are {FORMS}")
    low, high = _limits(values, where)
    known = key_of(key)
    numbers = set() if known is None else {int, float} & {known.kind, *get_args(known.kind)}
    if not numbers:
        raise ConfigError(f"{where}: {key} is not a number; list its values as {key}=choice:A,B")
    if kind != "linear" and low <= 0:
        raise ConfigError(f"{where}: a logarithmic range must start above 0, not at {low:g}")
    is_int = float not in numbers
    if is_int and (low % 1 or high % 1):
        raise ConfigError(f"{where}: {key} takes whole numbers; give such ends")
    if kind == "log2":
        # 1e-9: log2 of an exact power may be just below it
        num_doublings = math.floor(math.log2(high) - math.log2(low) + 1e-9)
        if num_doublings > MAX_DOUBLINGS:
            raise ConfigError(f"{where}: {num_doublings} doublings are more than {MAX_DOUBLINGS}; give a shorter range")
        doubled = [low * 2**power for power in range(num_doublings + 1)]
        return ValueList(key, tuple(f"{value:.12g}" for value in doubled), is_ordered=True)
    return SearchRange(key, low, high, is_log=kind == "log", is_int=is_int)


def _choices(values: str, where: str) -> tuple[str, ...]:
    try:
        parsed = parse_yaml(f"[{values}]")
    except ValueError:
        parsed = []
    choices = tuple(value if isinstance(value, str) else as_yaml(value) for value in parsed)
    if len(set(choices)) < max(len(choices), 2):
        raise ConfigError(f"{where}: a choice needs two different values or more, such as choice:0.9,0.95")
    return choices


def _limits(values: str, where: str) -> tuple[float, float]:
    try:
        low, high = map(decimal, values.split(":"))
    except ValueError:
        raise ConfigError(f"{where}: a range has two numbers; the forms are {FORMS}") from None
    if not -math.inf < low < high < math.inf:
        raise ConfigError(f"{where}: a range must go from a number to a larger one; swap or change them")
    return low, high
