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


def groups_text(conditions: Conditions) -> str:
    """Return the number of ranks of each node, such as 4+4."""
    return "+".join(str(len(group)) for group in conditions.groups)


class BenchReport:
    """Prints and stores rows on rank 0; does nothing on other ranks."""

    def __init__(
        self, conditions: Conditions, communicator: Communicator, *, command: str, output: Path | None
    ) -> None:
        self.conditions, self.communicator, self._command = conditions, communicator, command
        self._is_first = communicator.rank == 0
        self._output = output if self._is_first else None
        self._on_terminal = self._is_first and communicator.env.terminal_columns is not None
        self._file: BinaryIO | None = None

    def open(
        self, record: Mapping[str, object], lines: Iterable[str], *, columns: Columns, plot: Path | None = None
    ) -> None:
        """Open the file, so that an error comes early, and write the conditions and the table's head. Collective.

        record: further facts for the line of conditions. lines: the explanation of the columns.
        Raises: CommError on all ranks if the file or the plot cannot be written.
        """
        problem = ""
        try:
            if self._output:
                self._output.parent.mkdir(parents=True, exist_ok=True)
                self._file = open_named(self._output)
            if plot and self._is_first:
                require_nameable(plot)
        except OSError as error:
            problem = f"cannot write {error.filename}: {error.strerror}; choose another --output or --plot"
        if problem := self.communicator.gather_text(problem)[0]:
            raise CommError(problem)
        conditions = self.conditions
        self.write({"kind": "conditions", "command": self._command, **asdict(conditions), **record})
        hosts = ", ".join(dict.fromkeys(conditions.hosts))
        first, *others = lines
        started = "" if conditions.launcher == "none" else f"; started by {conditions.launcher}"
        self.print(
            f"# bigbatch comm bench: {count(len(conditions.hosts), 'rank')}, {groups_text(conditions)} per node; "
            f"backend {conditions.backend}; {first}{started}"
        )
        self.print(f"# hosts {hosts}; {conditions.device}; torch {conditions.torch}; {conditions.date}")
        for line in others:
            self.print(f"# {line}")
        self.print(table_head(columns))

    def working_on(self, text: str) -> None:
        """Show the current work in a status line; on a terminal only."""
        if self._on_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def print(self, line: str) -> None:
        if self._is_first:
            print_line(line)

    def write(self, record: Mapping[str, object]) -> None:
        if self._file:
            self._file.write((json.dumps(record) + "\n").encode())
            self._file.flush()

    def close(self) -> None:
        if self._file:
            self._file.close()
