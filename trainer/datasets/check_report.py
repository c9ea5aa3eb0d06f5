"""Report of a data set's check, as text and as JSON."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from bigbatch.cells import columns
from bigbatch.errors import DataError, printable
from bigbatch.files import as_json, write_named
from bigbatch.trainer.datasets.check import CheckReport, ImageFinding, SplitFacts
from bigbatch.trainer.input.base import written_keys


def print_report(report: CheckReport, *, console: Console) -> None:
    """Print the splits side by side, the findings and the conclusion; lines and colours only on a terminal."""
    title, *rows = (tuple(map(printable, row)) for row in table_rows(report))
    if console.is_terminal:
        table = Table(*title, title=Text(printable(report.root)))
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        for line in columns([title, *rows], right=range(1, len(title))):
            console.print(line, soft_wrap=True, highlight=False)
    for line in finding_lines((*report.problems, *report.remarks)):
        style = "red" if line.startswith("problem") else None
        console.print(printable(line), style=style, soft_wrap=True, highlight=False, markup=False)
    console.print(printable(conclusion(report)), style="bold", soft_wrap=True, highlight=False, markup=False)


def table_rows(report: CheckReport) -> list[tuple[str, ...]]:
    """Return a title row, then a row per fact with a cell per split."""
    splits = report.splits.values()
    forms = list(dict.fromkeys(form for facts in splits for form in facts.forms))
    by_split = [(split, *_cells(facts, forms)) for split, facts in report.splits.items()]
    names = ["", "images", "classes", "images per class", "median", "MB"]
    names += ["smallest side (pixels)", "median sides (short x long)", "largest side", *forms]
    return list(zip(names, *by_split, strict=True))


def _cells(facts: SplitFacts, forms: list[str]) -> list[str]:
    short, long, per_class = facts.short_side_pixels, facts.long_side_pixels, facts.per_class
    return [
        f"{facts.num_images:,}",
        f"{facts.num_classes:,}",
        " to ".join(f"{number:,}" for number in sorted({per_class.smallest, per_class.largest})),
        f"{per_class.median:,.0f}",
        f"{facts.num_bytes / 1e6:,.1f}",
        f"{short.smallest:,}",
        f"{short.median:,.0f} x {long.median:,.0f}",
        f"{long.largest:,}",
        *(f"{facts.forms.get(form, 0):,}" for form in forms),
    ]


def finding_lines(findings: Sequence[ImageFinding], *, num_shown: int = 1) -> Iterator[str]:
    """Yield a line per finding (place, kind, count), then its first num_shown cases."""
    for finding in findings:
        word = "problem" if finding.is_problem else "remark"
        meaning = f": {finding.meaning}" if finding.meaning else ""
        yield f"{word:7}  {printable(finding.where)}: {finding.kind} ({len(finding.cases):,}){meaning}"
        shown = [f"         {printable(case)}" for case in finding.cases[:num_shown]]
        more = len(finding.cases) - len(shown)
        yield from (*shown[:-1], shown[-1] + (f"   and {more:,} more" if more else ""))


def conclusion(report: CheckReport) -> str:
    """Return the report's last line."""
    num_images = sum(facts.num_images for facts in report.splits.values())
    num_problems = sum(len(finding.cases) for finding in report.problems)
    what = "fit for training" if not num_problems else f"NOT fit for training: {num_problems:,} problem(s)"
    done = "decoded" if report.decoded else "read, not decoded,"
    rate = num_images / max(report.seconds, 1e-9)
    return f"{report.root}: {what}; {num_images:,} images {done} in {report.seconds:.1f} s ({rate:,.0f} images/s)"


def write_json(report: CheckReport, path: Path) -> None:
    """Write the report with all cases of all findings. Raises: DataError if path cannot be written."""
    try:
        write_named(path, (as_json(asdict(report, dict_factory=written_keys), indent=1) + "\n").encode())
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); name another file") from error
