"""Output of a measurement of sums: rank 0 prints a table and writes a JSONL file."""

import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.tuning.conditions import Conditions
from bigbatch.errors import CommError, print_line
from bigbatch.files import open_named, require_nameable
from bigbatch.words import count

Columns = Sequence[tuple[str, str, int, Callable[[Any], object]]]
"""Title, unit and width of each column of a table, and the function that takes its value from a row."""


def table_head(columns: Columns) -> str:
    """Return the line of titles and the line of units."""
    lines = ("".join(f"{column[i]:>{column[2]}}" for column in columns) for i in (0, 1))
    return "\n".join(f"#{line[1:]}" for line in lines)


def table_line(columns: Columns, row: object) -> str:
    return "".join(f"{show(row)!s:>{width}}" for _, _, width, show in columns)


class BenchReport:
    """Prints and stores rows on rank 0; does nothing on other ranks."""

    def __init__(
        self,
        conditions: Conditions,
        communicator: Communicator,
        *,
        command: str,
        output: Path | None,
        plot: Path | None = None,
    ) -> None:
        self.conditions, self.communicator, self._command = conditions, communicator, command
        self._is_first = communicator.rank == 0
        self._output, self._plot = (output, plot) if self._is_first else (None, None)
        self._on_terminal = self._is_first and communicator.env.terminal_columns is not None
        self._file: BinaryIO | None = None
        self._columns: Columns = ()

    def open(self, record: Mapping[str, object], lines: Iterable[str], *, columns: Columns) -> None:
        """Open the file, so that an error comes early, and write the conditions and the table's head. Collective.

        record: further facts for the line of conditions. lines: the explanation of the columns.
        Raises: CommError on all ranks if the file or the plot cannot be written.
        """
        problem, conditions = "", self.conditions
        try:
            if self._output:
                self._output.parent.mkdir(parents=True, exist_ok=True)
                self._file = open_named(self._output)
            if self._plot:
                require_nameable(self._plot)
        except OSError as error:
            problem = f"cannot write {error.filename}: {error.strerror}; choose another --output or --plot"
        if problem := self.communicator.gather(problem)[0]:
            raise CommError(problem)
        self.write({"kind": "conditions", "command": self._command, **asdict(conditions), **record})
        first, *others = lines
        started = "" if conditions.launcher == "none" else f"; started by {conditions.launcher}"
        self._columns = columns
        self.print(f"# bigbatch comm bench: {self._job()}; backend {conditions.backend}; {first}{started}")
        hosts = ", ".join(dict.fromkeys(conditions.hosts))
        self.print(f"# hosts {hosts}; {conditions.device}; torch {conditions.torch}; {conditions.date}")
        for line in (*(f"# {line}" for line in others), table_head(columns)):
            self.print(line)

    def _job(self) -> str:
        groups = "+".join(str(len(group)) for group in self.conditions.groups)
        return f"{count(len(self.conditions.hosts), 'rank')}, {groups} per node"

    def describe(self, dtype: str) -> tuple[str, str]:
        """Return a plot's title and caption."""
        it = self.conditions
        release = f"torch {it.torch}, bigbatch {it.bigbatch} ({it.commit or 'commit unknown'})"
        title = f"All-reduce of {dtype}, {self._job()}; {it.backend}"
        return title, f"{it.device}; {release}, {it.kernel}; {it.date}"

    def working_on(self, text: str) -> None:
        """Show the current work in a status line; on a terminal only."""
        if self._on_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def print(self, line: str) -> None:
        """Print a line in place of the status line."""
        self.working_on("")
        if self._is_first:
            print_line(line)

    def rows(self, rows: Sequence[Any], *, shown: Sequence[Any] | None = None) -> None:
        """Write rows (dataclasses), and print them; shown: the rows as they are printed, if they differ."""
        for row, printed in zip(rows, shown or rows, strict=True):
            self.print(table_line(self._columns, printed))
            self.write({"kind": "row", **asdict(row)})

    def write(self, record: Mapping[str, object]) -> None:
        if self._file:
            self._file.write((json.dumps(record) + "\n").encode())
            self._file.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()
