"""What commands that measure sums say while they do: lines on the terminal, and the same as a JSONL file."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

from bigbatch.errors import print_line
from bigbatch.files import open_named


class Transcript:
    """Prints and keeps what the first rank finds out; on the other ranks it does nothing."""

    def __init__(self, output: Path | None, *, is_first: bool, on_terminal: bool) -> None:
        self._is_first = is_first
        self._output, self._on_terminal = output if is_first else None, is_first and on_terminal
        self._file: BinaryIO | None = None

    def open(self) -> None:
        """Open the file, before anything takes long. Raises: OSError."""
        if self._output:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            self._file = open_named(self._output)

    def working_on(self, text: str) -> None:
        """Show what is under way, in a line that the next one replaces; on a terminal only."""
        if self._on_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def print(self, line: str) -> None:
        """Show a line."""
        if self._is_first:
            print_line(line)

    def write(self, record: Mapping[str, object]) -> None:
        """Keep a record in the file, where there is one."""
        if self._file:
            self._file.write((json.dumps(record) + "\n").encode())
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        if self._file:
            self._file.close()
