"""`bigbatch report`: what sweeps and runs came to, in tables, plots and one page."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as Shown
from rich.text import Text

from bigbatch.launch.report import plots
from bigbatch.launch.report.accuracy import ToAccuracy, to_accuracy
from bigbatch.launch.report.collect import RunResults, SweepResults, differences, read_folder
from bigbatch.launch.report.page import make_page
from bigbatch.launch.report.split import Efficiency, compare
from bigbatch.launch.report.tables import (
    Table,
    accuracy_table,
    findings,
    markdown,
    percent,
    plain_cell,
    scaling_table,
    split_table,
    unmeasured_table,
)
from bigbatch.trainer.errors import ConfigError
from bigbatch.trainer.rundir import RunDir, writing


def main(argv: Sequence[str]) -> int:
    """Print and write the report; 0."""
    arguments = _parser().parse_args(argv)
    if arguments.target is not None and not 0 < arguments.target <= 1:
        raise ConfigError(f"--target {arguments.target:g} must be a share of right answers, such as 0.759")
    results = [read_folder(Path(folder)) for folder in arguments.folders]
    report = Report(
        [each for each in results if isinstance(each, SweepResults)],
        [(each, _to_accuracy(each, stated=arguments.target)) for each in results if isinstance(each, RunResults)],
    )
    folder = Path(arguments.output or Path(arguments.folders[0]) / "report")
    report.print()
    report.write(folder)
    print(f"written: {folder / 'report.html'} (and .md, .json, PNG and SVG beside it)")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bigbatch report",
        description="Scaling efficiency of sweeps, and what the rest is lost to: smaller local batches, exposed "
        "communication, input, stragglers. Of runs: time, GPU-hours and energy until an accuracy.",
        epilog="example: bigbatch report runs/sweeps/scaling",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("folders", nargs="+", metavar="FOLDER", help="of a sweep, or a run")
    add("--output", metavar="DIR", help="for report.html and the others (default: report, in the first FOLDER)")
    add("--target", type=float, help="top-1 of runs, such as 0.759 (default: the run's own target, else its best)")
    return parser


def _to_accuracy(run: RunResults, *, stated: float | None) -> ToAccuracy:
    """By the stated target, or the run's own. Raises: ConfigError for a damaged folder."""
    try:
        own = (run.config.get("run") or {}).get("target_top1")
        return to_accuracy(run.records, target=stated if stated is not None else own)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{run.folder}: its files are damaged: {type(error).__name__} {error}") from error


@dataclasses.dataclass(frozen=True)
class Report:
    """Of some sweeps and some runs."""

    sweeps: list[SweepResults]
    runs: list[tuple[RunResults, ToAccuracy]]

    @property
    def efficiencies(self) -> list[list[Efficiency]]:
        """Of each sweep that has figures."""
        return [compare(sweep.measured) for sweep in self.sweeps if sweep.measured]

    @property
    def findings(self) -> list[str]:
        """Sentences."""
        lines = [f"{sweep.name}: no point of it has figures yet." for sweep in self.sweeps if not sweep.measured]
        lines += [line for found in self.efficiencies for line in findings(found)]
        lines += [line for sweep in self.sweeps for line in differences(sweep.conditions)]
        return lines + [_finding(results, run) for results, run in self.runs]

    @property
    def tables(self) -> list[Table]:
        """Those that have rows."""
        found = [table for each in self.efficiencies for table in (scaling_table(each), split_table(each))]
        found.append(unmeasured_table(self.sweeps))
        found.append(accuracy_table([(results.folder, run) for results, run in self.runs]))
        return [table for table in found if table.rows]

    @property
    def conditions(self) -> dict[str, Any]:
        """What the figures depend on; of several folders, each under its name."""
        each = [(sweep.name, sweep.conditions) for sweep in self.sweeps]
        each += [(str(results.folder), results.conditions) for results, _ in self.runs]
        return {f"{name}: {key}" if len(each) > 1 else key: value for name, own in each for key, value in own.items()}

    def print(self) -> None:
        """On the terminal."""
        console = Console(width=None if sys.stdout.isatty() else 200)
        for line in self.findings:
            console.print(Text(line))
        for table in self.tables:
            shown = Shown(title=Text(table.title))
            for name in table.head:
                shown.add_column(Text(name))
            for row in table.rows:
                shown.add_row(*map(Text, row))
            console.print(shown)

    def write(self, folder: Path) -> None:
        """All files. Raises: RunFolderError."""
        figures = {}
        for index, found in enumerate(self.efficiencies):
            number = str(index + 1) if index else ""
            figures[f"efficiency{number}"] = plots.draw_efficiency(found)
            if any(each.point != each.base for each in found):
                figures[f"split{number}"] = plots.draw_split(found)
        if any(run.evaluations for _, run in self.runs):
            figures["accuracy"] = plots.draw_accuracy([(str(results.folder), run) for results, run in self.runs])
        pictures = {name: plots.as_svg(figure) for name, figure in figures.items()}
        title = "Scaling: " + ", ".join(sweep.name for sweep in self.sweeps) if self.sweeps else "Time to accuracy"
        page = make_page(
            title=title,
            findings=self.findings,
            pictures=pictures,
            tables=self.tables,
            conditions=self.conditions,
        )
        conditions = Table("Conditions", ("", ""), tuple((key, str(value)) for key, value in self.conditions.items()))
        lines = [f"# {title}", *map(plain_cell, self.findings), *map(markdown, (*self.tables, conditions))]
        text = "\n\n".join(lines)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for name, figure in figures.items():
                plots.save(figure, folder, name)
        out = RunDir(folder)
        out.write_text(folder / "report.html", page)
        out.write_text(folder / "report.md", text + "\n")
        out.write_text(folder / "report.json", json.dumps(self._facts(), indent=1) + "\n")

    def _facts(self) -> dict[str, Any]:
        sweeps = [
            [
                {
                    "values": dict(each.point.variant),
                    "ranks": each.point.ranks,
                    "global_batch_size": each.point.global_batch_size,
                    "step_seconds": each.point.step.seconds,
                    "parts_seconds": each.point.step.parts,
                    "images_per_second": {"median": each.point.rate, "each": each.point.rates},
                    "efficiency": each.efficiency,
                    "losses": {each.name_of(part): share for part, share in each.losses.items()},
                }
                for each in found
            ]
            for found in self.efficiencies
        ]
        runs = {str(results.folder): dataclasses.asdict(run) for results, run in self.runs}
        unmeasured = [list(each) for sweep in self.sweeps for each in sweep.unmeasured]
        return {"sweeps": sweeps, "unmeasured": unmeasured, "runs": runs, "conditions": self.conditions}


def _finding(results: RunResults, run: ToAccuracy) -> str:
    shown = run.shown
    if shown is None:
        return f"{results.folder}: no evaluation yet."
    verb = "reached" if run.reached else f"did not reach {percent(run.target)}; its best is"
    unit = "GPU-hours" if run.is_gpu else "hours of a rank on a CPU"
    return (
        f"{results.folder} {verb} {percent(shown.top1)} top-1 after {shown.hours:.2f} hours, "
        f"{shown.rank_hours:.2f} {unit}."
    )
