"""Compose the report of sweeps and runs, and write its files."""

import dataclasses
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigbatch.experiments.report import plots, tables
from bigbatch.experiments.report.collect import RunResults, SweepResults, ToAccuracy, differences
from bigbatch.experiments.report.compare import (
    Comparison,
    Curves,
    TrainedRun,
    best_of,
    best_run_of,
    cell_label,
    compare_runs,
    comparison_table,
    label_runs,
    run_records,
)
from bigbatch.experiments.report.pivot import Pivot, make_pivot
from bigbatch.experiments.report.predictions import read_predictions
from bigbatch.experiments.report.tuned import SearchResult, draw_tuned, read_searches, tuned_table
from bigbatch.files import as_json
from bigbatch.launch.efficiency import Efficiency, compare
from bigbatch.launch.page import as_svg, make_page
from bigbatch.launch.tables import Table, as_markdown, markdown, records_as_csv, show_table, shown_text, stdout_console
from bigbatch.trainer.folder.folder import RunDir, read_curves
from bigbatch.words import is_number, percent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

EXPLAINED = (
    "Efficiency: images per second and rank, relative to the fewest ranks. A step is computing, waiting for the wire, "
    "for images and for slower ranks; what each takes beyond its share of the ideal step adds up to what efficiency "
    "lacks. Medians over a run's reports but the first."
)

COMPARED = (
    "Accuracy and loss: of the last evaluation, mean and sample standard deviation over n seeds. Training: median and "
    "range of the seconds of training steps, without start, evaluation and checkpoints."
)


@dataclasses.dataclass(frozen=True)
class Report:
    sweeps: list[SweepResults]
    runs: list[tuple[RunResults, ToAccuracy]]
    target: float | None = None
    """Top-1 to reach, the same for all; None if no folder states one."""
    price: float | None = None
    """Price of a rank for an hour."""
    by: tuple[str, ...] = ()
    """Keys by which all runs are grouped; empty: the values in which a sweep's points differ."""
    pivot_keys: tuple[str, ...] = ()
    """Keys of the rows and columns of the pivot; empty: none."""
    more: tuple[Table, ...] = ()

    @property
    def efficiencies(self) -> list[tuple[SweepResults, list[Efficiency]]]:
        """Return the efficiencies of each sweep over numbers of ranks that has figures."""
        return [(sweep, compare(sweep.measured)) for sweep in self.sweeps if sweep.measured]

    @cached_property
    def trained(self) -> list[TrainedRun]:
        """Return each run once, those of sweeps first: a named folder may also be a point of a sweep."""
        plain = [results.trained(target=run.target) for results, run in self.runs]
        found: dict[str, TrainedRun] = {}
        for run in (*(run for sweep in self.sweeps for run in sweep.runs), *(run for run in plain if run)):
            found.setdefault(os.path.realpath(run.name), run)
        return [*found.values()]

    @cached_property
    def comparisons(self) -> list[Comparison]:
        """Return a comparison of each sweep, and of the other runs if there are several."""
        if self.by:
            title = f"Comparison by {', '.join(self.by)}"
            return [compare_runs(title, label_runs(self.trained, self.by), target=self.target)]
        found = [sweep.comparison for sweep in self.sweeps if sweep.runs]
        found = [each for each in found if each.has_accuracy or (each.cells[0].values and "ranks" not in each.keys)]
        plain = self.trained[sum(len(sweep.runs) for sweep in self.sweeps) :]
        if len(plain) > 1:
            found.append(compare_runs("Comparison of runs", label_runs(plain, ()), target=self.target))
        return found

    @cached_property
    def searches(self) -> list[tuple[str | None, list[SearchResult]]]:
        """Return the results of each sweep that tuned its cases, with its name if there are several."""
        found = [(self.name_of(sweep), read_searches(sweep.folder)) for sweep in self.sweeps]
        return [(name, results) for name, results in found if results]

    @cached_property
    def pivot(self) -> Pivot | None:
        return make_pivot(self.trained, self.pivot_keys) if self.pivot_keys and self.trained else None

    def name_of(self, sweep: SweepResults) -> str | None:
        """Return a sweep's folder if there are several sweeps, because their names may be equal; else None."""
        return str(sweep.folder) if len(self.sweeps) > 1 else None

    @property
    def findings(self) -> list[str]:
        lines = [f"{sweep.folder}: no point has figures yet." for sweep in self.sweeps if not sweep.runs]
        waiting = [(sweep.folder, sweep.waiting) for sweep in self.sweeps if sweep.waiting]
        lines += [f"{folder}: {tables.describe_waiting(found)}." for folder, found in waiting]
        for found in self.comparisons:
            lines += [line for line in (best_of(found), best_run_of(found), *found.notes) if line]
        lines += self.pivot.notes if self.pivot else ()
        lines += [
            line for sweep, found in self.efficiencies for line in tables.findings(found, name=self.name_of(sweep))
        ]
        for sweep in self.sweeps:
            name = self.name_of(sweep)
            lines += [f"{name}: {line}" if name else line for line in differences(sweep.conditions)]
        return lines + [self._finding(results, run) for results, run in self.runs]

    def _finding(self, results: RunResults, run: ToAccuracy) -> str:
        shown = run.shown
        if shown is None:
            return f"{results.folder}: no evaluation yet."
        verb = "reached" if run.reached else f"did not reach {percent(run.target)}; its best is"
        spent = tables.time_and_cost(shown, is_gpu=run.is_gpu, price=self.price)
        return f"{results.folder} {verb} {percent(shown.top1)} top-1 after {spent}."

    @property
    def tables(self) -> list[Table]:
        found = [*map(comparison_table, self.comparisons), *([self.pivot.table()] if self.pivot else []), *self.more]
        found += [tuned_table(results, name=name) for name, results in self.searches]
        for sweep, each in self.efficiencies:
            name = self.name_of(sweep)
            found += [tables.scaling_table(each, name=name, is_gpu=sweep.is_gpu, price=self.price)]
            found.append(tables.doubts_table(each, name=name, rerun=sweep.rerun_command))
            found.append(tables.split_table(each, name=name))
        found.append(tables.unmeasured_table(self.sweeps))
        found.append(tables.accuracy_table([(results.folder, run) for results, run in self.runs], price=self.price))
        found.append(tables.noise_table([results for results, _ in self.runs]))
        return [table for table in found if table.rows]

    @property
    def conditions(self) -> dict[str, Any]:
        """Return the conditions of the figures; of several folders, each under its name."""
        each = [(str(results.folder), results.conditions) for results in self.sweeps]
        each += [(str(results.folder), results.conditions) for results, _ in self.runs]
        found = {f"{name}: {key}" if len(each) > 1 else key: value for name, own in each for key, value in own.items()}
        return found if self.price is None else found | {"price of a rank (a GPU) for an hour": self.price}

    def print(self) -> None:
        console = stdout_console()
        for line in self.findings:
            console.print(shown_text(line))
        for table in self.tables:
            show_table(table, console)

    def write(self, folder: Path, *, within: Path) -> list[str]:
        """Write all files into folder, and return their names; within: the folder that the user named, or folder.

        Raises: RunFolderError.
        """
        figures = self._draw()
        images = {name: as_svg(figure) for name, figure in figures.items()}
        names = ", ".join(dict.fromkeys(sweep.name for sweep in self.sweeps))
        kind = "Scaling" if self.efficiencies else "Comparison" if self.comparisons or names else "Time to accuracy"
        title = f"{kind}: {names}" if names else kind
        is_scaling = any(each.point != each.base for _, found in self.efficiencies for each in found)
        all_tables = [*self.tables, tables.conditions_table(self.conditions)]
        lines = [f"# {as_markdown(title)}", *map(as_markdown, self.findings), *map(markdown, all_tables)]
        texts = {f"{name}.svg": image for name, image in images.items()}
        texts["report.html"] = make_page(
            title=title,
            findings=self.findings,
            images=images,
            tables=all_tables,
            note=EXPLAINED if is_scaling else COMPARED if self.comparisons else None,
        )
        texts["report.md"] = "\n\n".join(lines) + "\n"
        texts["report.json"] = as_json(self._facts(), indent=1) + "\n"
        if self.trained:
            texts["runs.csv"] = records_as_csv(list(run_records(self.trained)))
        if self.comparisons:
            texts["cells.csv"] = records_as_csv([cell.record() for found in self.comparisons for cell in found.cells])
        if self.pivot:
            texts |= {"pivot.csv": records_as_csv(list(self.pivot.records())), "pivot.tex": self.pivot.latex()}
        if self.efficiencies:
            kept = ("ranks", "global_batch_size", "step_seconds", "efficiency", "base_ranks")
            rows = [self._row(each) for _, found in self.efficiencies for each in found]
            texts["scaling.csv"] = records_as_csv(
                [
                    {
                        **row["values"],
                        **{key: row[key] for key in (*kept, "rank_hours_of_million_images")},
                        "images_per_second": row["images_per_second"]["median"],
                        "in_doubt_for": "; ".join(row["in_doubt_for"]),
                    }
                    for row in rows
                ]
            )
        out = RunDir(within)
        for name, text in texts.items():
            out.write_text(folder / name, text)
        for name, figure in figures.items():
            out.save_plot(folder / f"{name}.png", figure)
        return [*texts, *(f"{name}.png" for name in figures)]

    def _draw(self) -> "dict[str, Figure]":
        figures = {}
        for index, found in enumerate(each for each in self.comparisons if len(each.cells) > 1):
            figures[f"comparison{index + 1 if index else ''}"] = plots.draw_comparison(found)
        for index, (_, results) in enumerate(self.searches):
            figures[f"tuned{index + 1 if index else ''}"] = draw_tuned(results)
        if curves := self._curves():
            figures["curves"] = plots.draw_curves(curves)
        for index, (sweep, scaled) in enumerate(self.efficiencies):
            number, name = str(index + 1) if index else "", self.name_of(sweep)
            if stated := [each for each in scaled if each.point != each.base and not tables.doubts(each)]:
                figures[f"efficiency{number}"] = plots.draw_efficiency(
                    scaled, name=name, predicted=read_predictions(sweep.folder)
                )
                figures[f"split{number}"] = plots.draw_split(stated, name=name)
        if any(run.evaluations for _, run in self.runs):
            figures["accuracy"] = plots.draw_accuracy([(str(results.folder), run) for results, run in self.runs])
        return figures

    def _curves(self) -> list[tuple[str, list[Curves]]]:
        """Return the label of each cell with accuracy, and the curves of its runs."""
        compared = [found for found in self.comparisons if found.has_accuracy]
        curves = []
        for found in compared:
            for cell in found.cells:
                label = ": ".join(filter(None, (found.title if len(compared) > 1 else "", cell_label(cell))))
                curves.append((label or found.title, [read_run_curves(run) for run in cell.runs]))
        return curves

    def _facts(self) -> dict[str, Any]:
        found = [dataclasses.asdict(each) for _, results in self.searches for each in results]
        return {
            **({"searches": found} if found else {}),
            "sweeps": {str(sweep.folder): [self._row(each) for each in found] for sweep, found in self.efficiencies},
            "cells": [cell.record() for found in self.comparisons for cell in found.cells],
            "trained": list(run_records(self.trained)),
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
            "in_doubt_for": tables.doubts(each),
            "base_ranks": each.base.ranks,
            "fewest_ranks": each.base.fewest_ranks,
            "losses": {each.name_of(part): share for part, share in each.losses.items()},
            "rank_hours_of_million_images": hours,
            "joules_per_image": each.point.joules_per_image,
            "cost_of_million_images": None if self.price is None else self.price * hours,
        }


def read_run_curves(run: TrainedRun) -> Curves:
    """Read a run's learning curves; of an epoch that a restart repeats the last one counts. Raises: RunFolderError."""
    curves = Curves({}, {})
    found: tuple[Any, Any]
    for record in read_curves(RunDir(Path(run.name)).metrics):
        for kind, name, values in (("train", "loss", curves.loss), ("eval", "top1", curves.top1)):
            found = (record.get("epoch"), record.get(name))
            if record["kind"] == kind and all(map(is_number, found)):
                values[found[0]] = found[1]
    return curves
