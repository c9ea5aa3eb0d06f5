"""What a report says of some sweeps and some runs, and the files that it becomes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from bigbatch.launch.efficiency import Efficiency, compare
from bigbatch.launch.page import as_svg, make_page
from bigbatch.launch.report import plots
from bigbatch.launch.report.accuracy import ToAccuracy
from bigbatch.launch.report.collect import RunResults, SweepResults, differences
from bigbatch.launch.report.doubts import doubts
from bigbatch.launch.report.tables import (
    accuracy_table,
    conditions_table,
    cost,
    findings,
    noise_table,
    scaling_table,
    split_table,
    unmeasured_table,
)
from bigbatch.launch.tables import Table, markdown, plain_cell, show_table, shown_text, stdout_console
from bigbatch.launch.words import percent
from bigbatch.trainer.run.folder import RunDir

EXPLAINED = (
    "Efficiency: images per second and rank, beside the fewest ranks. A step is computing, waiting for the wire, for "
    "pictures and for slower ranks; what each takes beyond its share of the ideal step adds up to what efficiency "
    "lacks. Medians over a run's reports but the first."
)


@dataclasses.dataclass(frozen=True)
class ScalingReport:
    """This is the report of some sweeps and some runs."""

    sweeps: list[SweepResults]
    runs: list[tuple[RunResults, ToAccuracy]]
    price: float | None
    """Of an hour of a rank."""

    @property
    def efficiencies(self) -> list[tuple[SweepResults, list[Efficiency]]]:
        """Return those of each sweep that has figures."""
        return [(sweep, compare(sweep.measured)) for sweep in self.sweeps if sweep.measured]

    def name_of(self, sweep: SweepResults) -> str | None:
        """Return its folder, where there are several sweeps: they may be called the same."""
        return str(sweep.folder) if len(self.sweeps) > 1 else None

    @property
    def findings(self) -> list[str]:
        """Return sentences."""
        lines = [f"{sweep.folder}: no point of it has figures yet." for sweep in self.sweeps if not sweep.measured]
        lines += [line for sweep, found in self.efficiencies for line in findings(found, name=self.name_of(sweep))]
        for sweep in self.sweeps:
            name = self.name_of(sweep)
            lines += [f"{name}: {line}" if name else line for line in differences(sweep.conditions)]
        return lines + [self._finding(results, run) for results, run in self.runs]

    def _finding(self, results: RunResults, run: ToAccuracy) -> str:
        shown = run.shown
        if shown is None:
            return f"{results.folder}: no evaluation yet."
        verb = "reached" if run.reached else f"did not reach {percent(run.target)}; its best is"
        spent = cost(shown.rank_hours, is_gpu=run.is_gpu, price=self.price)
        return f"{results.folder} {verb} {percent(shown.top1)} top-1 after {shown.hours:.2f} hours, {spent}."

    @property
    def tables(self) -> list[Table]:
        """Return those that have rows."""
        found = []
        for sweep, each in self.efficiencies:
            name = self.name_of(sweep)
            found += [scaling_table(each, name=name, is_gpu=sweep.is_gpu, price=self.price)]
            found += [split_table(each, name=name)]
        found.append(unmeasured_table(self.sweeps))
        found.append(accuracy_table([(results.folder, run) for results, run in self.runs], price=self.price))
        found.append(noise_table([results for results, _ in self.runs]))
        return [table for table in found if table.rows]

    @property
    def conditions(self) -> dict[str, Any]:
        """Return what the figures depend on; of several folders, each under its name."""
        each = [(str(results.folder), results.conditions) for results in self.sweeps]
        each += [(str(results.folder), results.conditions) for results, _ in self.runs]
        found = {f"{name}: {key}" if len(each) > 1 else key: value for name, own in each for key, value in own.items()}
        return found if self.price is None else found | {"price of a rank (a GPU) for an hour": self.price}

    def print(self) -> None:
        """Print it on the terminal."""
        console = stdout_console()
        for line in self.findings:
            console.print(shown_text(line))
        for table in self.tables:
            show_table(table, console)

    def write(self, folder: Path, *, within: Path) -> None:
        """Write all files into a folder, which is or lies in one that the user named. Raises: RunFolderError."""
        figures = {}
        for index, (sweep, found) in enumerate(self.efficiencies):
            number, name = str(index + 1) if index else "", self.name_of(sweep)
            if stated := [each for each in found if each.point != each.base and not doubts(each)]:
                figures[f"efficiency{number}"] = plots.draw_efficiency(found, name=name)
                figures[f"split{number}"] = plots.draw_split(stated, name=name)
        if any(run.evaluations for _, run in self.runs):
            figures["accuracy"] = plots.draw_accuracy([(str(results.folder), run) for results, run in self.runs])
        images = {name: as_svg(figure) for name, figure in figures.items()}
        names = dict.fromkeys(sweep.name for sweep in self.sweeps)
        title = "Scaling: " + ", ".join(names) if names else "Time to accuracy"
        page = make_page(
            title=title,
            findings=self.findings,
            images=images,
            tables=[*self.tables, conditions_table(self.conditions)],
            note=EXPLAINED
            if any(each.point != each.base for _, found in self.efficiencies for each in found)
            else None,
        )
        lines = [
            f"# {title}",
            *map(plain_cell, self.findings),
            *map(markdown, (*self.tables, conditions_table(self.conditions))),
        ]
        text = "\n\n".join(lines)
        out = RunDir(within)
        for name, figure in figures.items():
            out.save_plot(folder / f"{name}.png", figure)
            out.write_text(folder / f"{name}.svg", images[name])
        out.write_text(folder / "report.html", page)
        out.write_text(folder / "report.md", text + "\n")
        out.write_text(folder / "report.json", json.dumps(self._facts(), indent=1) + "\n")

    def _facts(self) -> dict[str, Any]:
        """Return numbers by folder."""
        return {
            "sweeps": {str(sweep.folder): [self._row(each) for each in found] for sweep, found in self.efficiencies},
            "unmeasured": [[str(sweep.folder), *each] for sweep in self.sweeps for each in sweep.unmeasured],
            "runs": {
                str(results.folder): {**dataclasses.asdict(run), **(results.noise_scale or {})}
                for results, run in self.runs
            },
            "price_of_rank_hour": self.price,
            "conditions": self.conditions,
        }

    def _row(self, each: Efficiency) -> dict[str, Any]:
        hours = each.point.million_images_rank_hours
        return {
            "values": dict(each.point.variant),
            "ranks": each.point.ranks,
            "global_batch_size": each.point.global_batch_size,
            "step_seconds": each.point.step.seconds,
            "parts_seconds": each.point.step.parts,
            "images_per_second": {"median": each.point.rate, "each": each.point.rates},
            "efficiency": each.efficiency,
            "in_doubt_for": doubts(each),
            "base_ranks": each.base.ranks,
            "fewest_ranks": each.base.fewest_ranks,
            "losses": {each.name_of(part): share for part, share in each.losses.items()},
            "rank_hours_of_million_images": hours,
            "joules_per_image": each.point.joules_per_image,
            "cost_of_million_images": None if self.price is None else self.price * hours,
        }
