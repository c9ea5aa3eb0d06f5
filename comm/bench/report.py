"""What a sweep leaves behind: the table on the terminal, a JSONL file, a plot."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bigbatch.comm.bench import figures as bench
from bigbatch.comm.bench.plot import plot_sweep
from bigbatch.comm.bench.transcript import Transcript
from bigbatch.comm.tuning.conditions import Conditions
from bigbatch.files import require_nameable


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
        self._plot = plot if is_first else None
        self._transcript = Transcript(output, is_first=is_first, on_terminal=on_terminal)
        self._rows: list[bench.Row] = []

    @property
    def num_wrong(self) -> int:
        """Return the number of wrong elements so far."""
        return sum(row.num_wrong for row in self._rows)

    def open(self, command: str) -> str:
        """Open the files, before anything takes long; return what stands in the way, or nothing."""
        try:
            self._transcript.open()
            if self._plot:
                require_nameable(self._plot)
        except OSError as error:
            return f"cannot write {error.filename}: {error.strerror}; choose another --output or --plot"
        head = {"command": command, **dataclasses.asdict(self._conditions)}
        limit = dataclasses.asdict(self._limit) if self._limit else None
        self._transcript.write({"kind": "conditions", **head, "limit": limit})
        return ""

    def head(self, limit: str) -> None:
        """Write the lines above the table."""
        conditions = self._conditions
        self._transcript.print(
            f"# bigbatch comm bench: {len(conditions.hosts)} ranks, {self._groups()} per node; backend "
            f"{conditions.backend}; wire {conditions.wire_dtype or self._dtype}; started by {conditions.launcher}"
        )
        hosts = ", ".join(dict.fromkeys(conditions.hosts))
        self._transcript.print(f"# hosts {hosts}; {conditions.device}; torch {conditions.torch}; {conditions.date}")
        self._transcript.print(
            "# time: median of n repetitions, each that of the slowest rank; * is the fastest of its size"
        )
        self._transcript.print("# algbw = size / time; busbw = algbw * 2(ranks-1)/ranks; GB = 1e9 bytes")
        self._transcript.print(f"# {limit}")
        self._transcript.print(bench.table_head())

    def working_on(self, text: str) -> None:
        """Show what is under way, as Transcript.working_on does."""
        self._transcript.working_on(text)

    def add(self, rows: Sequence[bench.Row]) -> None:
        """Show and keep one size."""
        self._rows += rows
        self.working_on("")
        for line in bench.table_lines(rows):
            self._transcript.print(line)
        for row in rows:
            self._transcript.write({"kind": "row", **dataclasses.asdict(row)})

    def close(self) -> None:
        """Write the sum of it, and the plot."""
        self._transcript.print(f"# wrong values: {self.num_wrong}")
        self._transcript.close()
        if self._plot:
            conditions = self._conditions
            job = f"{len(conditions.hosts)} ranks, {self._groups()} per node; {conditions.backend}"
            caption = (
                f"{conditions.device}; torch {conditions.torch}, bigbatch {conditions.bigbatch} "
                f"({conditions.commit or 'commit unknown'}), {conditions.kernel}; {conditions.date}"
            )
            plot_sweep(
                self._rows, self._plot, limit=self._limit, title=f"All-reduce of {self._dtype}, {job}", caption=caption
            )
            self._transcript.print(f"# plot: {self._plot}")

    def _groups(self) -> str:
        return "+".join(str(len(group)) for group in self._conditions.groups)
