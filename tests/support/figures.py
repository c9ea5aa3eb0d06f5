"""Write the measured figures of pages from their records: make figures.

A marker <!--= RECORD: EXPRESSION --> follows a figure: a comment, which a reader of the page does not see. EXPRESSION
is Python over the keys of benchmarks/results/RECORD.json; its values are the last figures before the marker, in their
order. A figure keeps its digits; None leaves one as it is. Code, links and the first cells of rows have no figures.
"""

import json
import re
import statistics
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
FILES = (
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "configs").rglob("*.yaml")),
)
MARKER = re.compile(r"<!--= ([\w-]+): (.*?) -->", re.S)
FIGURE = re.compile(r"(?<![\w.,-])-?\d+(?:,\d{3})*(?:\.\d+)?(?:e-?\d+)?(?!\.?\w)")
SKIPPED = re.compile(r"<!--.*?-->|`[^`\n]*`|\]\([^)\n]*\)|^\|[^|\n]*", re.M | re.S)
MEASURED = re.compile(r"\bn = \d|\bload (?:average|of) \d|\bcommit [0-9a-f]{8}")
"""Conditions of a measurement, in a paragraph or table."""


class Figure(NamedTuple):
    """A figure of a page: its place in the text, what stands there, and what its record has."""

    start: int
    shown: str
    expected: str


class Row(dict[str, Any]):
    """An object of a record, whose keys are attributes, too."""

    __getattr__ = dict.__getitem__


def median_min_max(row: Row, scale: float = 1) -> list[float]:
    return [scale * row[key] for key in ("median", "min", "max")]


def find(rows: Iterable[Row], **keys: Any) -> Row:
    """Return the only row with these values."""
    [row] = [row for row in rows if all(row.get(key) == value for key, value in keys.items())]
    return row


NAMES = {
    "median_min_max": median_min_max,
    "find": find,
    "mean": statistics.fmean,
    "sd": statistics.stdev,
    "median": statistics.median,
}


@cache
def record(name: str) -> Row:
    found: Row = json.loads((RESULTS / f"{name}.json").read_text(), object_hook=Row)
    return found


def flat(value: Any) -> Iterator[float | None]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from flat(each)
    else:
        yield value


def in_digits_of(shown: str, value: float) -> str:
    """Write value with the digits that stand there."""
    digits = len(re.sub(r"e.*", "", shown).partition(".")[2])
    if "e" in shown:
        return re.sub(r"e([-+])0*", lambda sign: f"e{sign[1].strip('+')}", f"{value:.{digits}e}")
    return f"{value:,.{digits}f}"


def figures(text: str) -> Iterator[Figure]:
    """Yield what the markers of a text cover. Raises: AssertionError if a marker finds too few figures."""
    hidden = SKIPPED.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    start = 0
    for marker in MARKER.finditer(text):
        values = list(flat(eval(marker[2], {**NAMES, "record": record, **record(marker[1])})))
        places = list(FIGURE.finditer(hidden, start, marker.start()))[-len(values) :]
        assert len(places) == len(values), f"fewer figures than values since the last marker: {marker[0]}"
        for place, value in zip(places, values, strict=True):
            yield Figure(place.start(), place[0], place[0] if value is None else in_digits_of(place[0], value))
        start = marker.end()


def written(text: str) -> str:
    """Return the text with the figures of its records."""
    for place, shown, expected in sorted(figures(text), reverse=True):
        text = text[:place] + expected + text[place + len(shown) :]
    return text


def without_record(text: str) -> list[str]:
    """Return how the parts of a page begin that state conditions, if neither they nor a neighbour have a marker."""
    parts = re.split(r"\n\s*\n|\n(?=- |\d+\. )", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))
    return [
        " ".join(part.split())[:90]
        for number, part in enumerate(parts)
        if MEASURED.search(part) and not MARKER.search("".join(parts[max(0, number - 1) : number + 2]))
    ]


if __name__ == "__main__":
    for path in FILES:
        before = path.read_text()
        after = written(before)
        name = path.relative_to(ROOT)
        if after != before:
            for figure in figures(before):  # a new figure before a marker shifts the others: look at what is written
                if figure.shown != figure.expected:
                    print(f"{name}: {figure.shown} -> {figure.expected}")
            path.write_text(after)
        for beginning in without_record(after) if path.suffix == ".md" else ():
            print(f"{name}: without a record: {beginning}")
