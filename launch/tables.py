"""Tables of text for the terminal, Markdown and HTML pages."""

import csv
import html
import io
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table as Shown
from rich.text import Text

from bigbatch.cells import text_cell
from bigbatch.errors import printable

NOT_MEASURED = "Not measured"
UNREPORTED = "not reported by a driver"
NUMBER = re.compile(r"[-+]?\d[\d,.]*(\s|%|$)")
"""First characters of a cell in a column of numbers."""
BLANKS = ("", NOT_MEASURED.lower(), UNREPORTED)
"""Cells of such a column without a number."""


@dataclass(frozen=True)
class Table:
    """Rows of text under a title."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    @property
    def is_number(self) -> tuple[bool, ...]:
        """Return for each column whether it contains numbers, which are right-aligned."""
        columns = [[row[column] for row in self.rows if row[column] not in BLANKS] for column in range(len(self.head))]
        return tuple(bool(cells) and all(map(NUMBER.match, cells)) for cells in columns)


def table_of(title: str, columns: Mapping[str, Sequence[str]]) -> Table:
    return Table(title, tuple(columns), tuple(zip(*columns.values(), strict=True)))


def duration(hours: float) -> str:
    """Write 0.11 -> '6.6 min', 12.3 -> '12.30 h'."""
    if hours >= 1:
        return f"{hours:,.2f} h"
    return f"{60 * hours:.1f} min" if hours >= 1 / 60 or not hours else f"{3600 * hours:.1f} s"


def stdout_console() -> Console:
    """Return a console as wide as the terminal; without one, wide enough not to wrap rows."""
    return Console(width=None if sys.stdout.isatty() else 200)


def shown_text(text: str) -> Text:
    """Return a line for a terminal without markup and control sequences."""
    return Text(printable(text))


def show_table(table: Table, console: Console) -> None:
    """Print the table; its text is not interpreted as markup or control sequences."""
    shown = Shown(title=shown_text(table.title))
    for name, is_number in zip(table.head, table.is_number, strict=True):
        shown.add_column(shown_text(name), justify="right" if is_number else "left")
    for row in table.rows:
        shown.add_row(*map(shown_text, row))
    console.print(shown)


def markdown(table: Table) -> str:
    rules = ["---:" if is_number else "---" for is_number in table.is_number]
    lines = [table.head, rules, *table.rows]
    rows = ("| " + " | ".join(map(as_markdown, line)) + " |" for line in lines)
    return "\n".join([f"## {as_markdown(table.title)}", "", *rows])


def as_csv(rows: Iterable[Sequence[object]]) -> str:
    """Return rows, the head first, as CSV; texts hold neither escapes nor formulas."""
    out = io.StringIO()
    texts = ([text_cell(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
    csv.writer(out, lineterminator="\n").writerows(texts)
    return out.getvalue()


def records_as_csv(records: Sequence[Mapping[str, object]]) -> str:
    """Return a row for each record, with the keys of all as the head, as CSV."""
    head = list(dict.fromkeys(key for record in records for key in record))
    return as_csv([head, *([record.get(key, "") for key in head] for record in records)])


def as_markdown(text: str) -> str:
    """Return text as one line of Markdown, or one cell of its tables, without markup: HTML, links, images."""
    return re.sub(r"[\\\[|]", r"\\\g<0>", html.escape(plain(text), quote=False))


def plain(text: str) -> str:
    """Return text as one line without control characters; its white space may be any."""
    return printable(" ".join(text.split()))
