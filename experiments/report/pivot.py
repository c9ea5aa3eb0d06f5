"""A table of rows by columns for a paper: each entry pools the runs that differ only in their seeds. Pure."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bigbatch.experiments.report.compare import (
    Cell,
    TrainedRun,
    compare_runs,
    differing_keys,
    group_runs,
    label_runs,
    short_key,
    value_text,
)
from bigbatch.launch.tables import Table, plain
from bigbatch.words import count

LATEX = dict(zip("&%$#_{}", (rf"\{each}" for each in "&%$#_{}"), strict=True)) | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "±": r"$\pm$",
}


@dataclass(frozen=True)
class Entry:
    row: Any
    column: Any
    cells: tuple[Cell, ...]
    """One, if its runs differ only in their seeds."""
    differing: tuple[str, ...]
    """Keys in which the runs of several cells differ: a mean over them would say nothing."""
    repeats: int
    """Runs that repeat settings and seed of another; they do not count."""

    def text(self, name: str, scale: float) -> str:
        if len(self.cells) > 1:
            return f"not pooled ({', '.join(map(short_key, self.differing))})"
        cell = self.cells[0]
        if (mean := cell.mean(name)) is None:
            return f"(n = {len(cell.runs)})"
        deviation = cell.deviation(name)
        spread = "" if deviation is None else f" ± {scale * deviation:.2f}"
        return f"{scale * mean:,.2f}{spread} (n = {len(cell.values_of(name))})"


@dataclass(frozen=True)
class Pivot:
    keys: tuple[str, ...]
    """Keys of the rows, and of the columns."""
    entries: tuple[Entry, ...]

    @property
    def figure(self) -> tuple[str, float, str]:
        """Return the name of the figure, its scale, and its title: top-1, or the speed of runs without accuracy."""
        if any(cell.values_of("top1") for entry in self.entries for cell in entry.cells):
            return "top1", 100.0, "top-1 (%)"
        return "images_per_second", 1.0, "images/s"

    @property
    def title(self) -> str:
        return f"{self.figure[2]} by {' and '.join(self.keys)}: mean ± sample standard deviation over n seeds"

    @property
    def notes(self) -> Iterator[str]:
        for entry in self.entries:
            place = f"{short_key(self.keys[0])} {value_text(entry.row)}, {short_key(self.keys[1])} "
            place += value_text(entry.column)
            if len(entry.cells) > 1:
                differing = ", ".join(entry.differing)
                yield f"{place}: not pooled, because the runs differ in more than their seeds: {differing}."
            if entry.repeats:
                yield f"{place}: {count(entry.repeats, 'run')} not counted, which repeat settings and seed of another."

    def table(self) -> Table:
        rows, columns = (_ordered([getattr(entry, name) for entry in self.entries]) for name in ("row", "column"))
        name, scale, _ = self.figure
        texts = {(repr(each.row), repr(each.column)): each.text(name, scale) for each in self.entries}
        head = (short_key(self.keys[0]), *(f"{short_key(self.keys[1])} {value_text(each)}" for each in columns))
        lines = [(value_text(row), *(texts.get((repr(row), repr(each)), "") for each in columns)) for row in rows]
        return Table(self.title, head, tuple(lines))

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield a row of CSV for each entry; one that is not pooled has no mean."""
        name, _, _ = self.figure
        for entry in self.entries:
            cell = entry.cells[0] if len(entry.cells) == 1 else None
            yield {
                self.keys[0]: entry.row,
                self.keys[1]: entry.column,
                "n": len(cell.values_of(name)) if cell else 0,
                f"{name}_mean": cell.mean(name) if cell else None,
                f"{name}_deviation": cell.deviation(name) if cell else None,
                "not_pooled": ", ".join(entry.differing),
            }

    def latex(self) -> str:
        """Return a tabular environment, for the package booktabs."""
        table = self.table()
        head, *rows = (" & ".join(map(as_latex, line)) + r" \\" for line in (table.head, *table.rows))
        begin = rf"\begin{{tabular}}{{l{'r' * (len(table.head) - 1)}}}"
        comment = f"% {plain(table.title)}; \\usepackage{{booktabs}}"
        lines = (comment, begin, r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}")
        return "\n".join(lines) + "\n"


def make_pivot(runs: Sequence[TrainedRun], keys: tuple[str, ...]) -> Pivot:
    """Group runs by two keys of the experiment, or of a sweep."""
    entries = []
    for group in group_runs(label_runs(runs, keys), lambda run: [run.values[key] for key in keys]):
        cells = compare_runs("", label_runs(group, ())).cells
        differing = tuple(differing_keys(group)) if len(cells) > 1 else ()
        repeats = len(group) - sum(len(cell.runs) for cell in cells)
        row, column = (group[0].values[key] for key in keys)
        entries.append(Entry(row, column, cells, differing, repeats))
    return Pivot(keys, tuple(entries))


def as_latex(text: str) -> str:
    """Return text as one line of LaTeX in which nothing is a command, with ± as its sign."""
    return re.sub(r"[&%$#_{}~^\\±]", lambda match: LATEX[match[0]], plain(text))


def _ordered(values: Sequence[Any]) -> list[Any]:
    """Return each value once: numbers from the smallest, others as they come."""
    once = list({repr(value): value for value in values}.values())
    return sorted(once) if all(type(value) in (int, float) for value in once) else once
