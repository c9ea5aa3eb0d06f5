"""What a sweep leaves behind: the table on the terminal, a JSONL file, a plot."""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from bigbatch.comm.bench import figures as bench
from bigbatch.comm.bench.plot import plot_sweep
from bigbatch.comm.tuning.conditions import Conditions


class SweepReport:
    """Writes the first rank's table, JSONL file and plot; on the other ranks it only counts wrong values."""

    def __init__(
        self,
        conditions: Conditions,
        limit: bench.Limit | None,
        *,
        dtype: str,
        output: Path | None,
        plot: Path | None,
        is_first: bool,
        on_terminal: bool,
    ) -> None:
        self._conditions, self._limit, self._dtype = conditions, limit, dtype
        self._output, self._plot = output, plot
        self._is_first = is_first
        self._on_terminal = is_first and on_terminal
        self._rows: list[bench.Row] = []
        self._file: TextIO | None = None

    @property
    def num_wrong(self) -> int:
        """Return the number of wrong elements so far."""
        return sum(row.num_wrong for row in self._rows)

    def open(self, command: str) -> str:
        """Open the files, before anything takes long; return what stands in the way, or nothing."""
        if not self._is_first:
            return ""
        try:
            for path in (self._output, self._plot):
                if path:
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.open("w").close()
            if self._output:
                self._file = self._output.open("w")
        except OSError as error:
            return f"cannot write {error.filename}: {error.strerror}; choose another --output or --plot"
        head = {"command": command, **dataclasses.asdict(self._conditions)}
        limit = dataclasses.asdict(self._limit) if self._limit else None
        self._write({"kind": "conditions", **head, "limit": limit})
        return ""

    def head(self, limit: str) -> None:
        """Write the lines above the table."""
        conditions = self._conditions
        self._print(
            f"# bigbatch comm bench: {len(conditions.hosts)} ranks, {self._groups()} per node; backend "
            f"{conditions.backend}; wire {conditions.wire_dtype or self._dtype}; started by {conditions.launcher}"
        )
        hosts = ", ".join(dict.fromkeys(conditions.hosts))
        self._print(f"# hosts {hosts}; {conditions.device}; torch {conditions.torch}; {conditions.date}")
        self._print("# time: median of n repetitions, each that of the slowest rank; * is the fastest of its size")
        self._print("# algbw = size / time; busbw = algbw * 2(ranks-1)/ranks; GB = 1e9 bytes")
        self._print(f"# {limit}")
        self._print(bench.table_head())

    def working_on(self, text: str) -> None:
        """Show what is under way, in a line that the next one replaces; on a terminal only."""
        if self._on_terminal:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def add(self, rows: Sequence[bench.Row]) -> None:
        """Show and keep one size."""
        self._rows += rows
        if self._on_terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        for line in bench.table_lines(rows):
            self._print(line)
        for row in rows:
            self._write({"kind": "row", **dataclasses.asdict(row)})

    def close(self) -> None:
        """Write the sum of it, and the plot."""
        self._print(f"# wrong values: {self.num_wrong}")
        if self._file:
            self._file.close()
        if self._is_first and self._plot:
            conditions = self._conditions
            job = f"{len(conditions.hosts)} ranks, {self._groups()} per node; {conditions.backend}"
            caption = (
                f"{conditions.device}; torch {conditions.torch}, bigbatch {conditions.bigbatch} "
                f"({conditions.commit or 'commit unknown'}), {conditions.kernel}; {conditions.date}"
            )
            plot_sweep(
                self._rows, self._plot, limit=self._limit, title=f"All-reduce of {self._dtype}, {job}", caption=caption
            )
            self._print(f"# plot: {self._plot}")

    def _groups(self) -> str:
        return "+".join(str(len(group)) for group in self._conditions.groups)

    def _print(self, line: str) -> None:
        if self._is_first:
            print(line, flush=True)

    def _write(self, record: Mapping[str, object]) -> None:
        if self._file:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()
