"""Compare runs: cells of equal values, with mean and standard deviation over their seeds. Pure."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bigbatch.experiments.engine.plan import CASE
from bigbatch.launch.tables import Table, table_of
from bigbatch.trainer.config.sections import RECORDING_KEYS
from bigbatch.trainer.config.strict_yaml import as_yaml
from bigbatch.words import count, percent

DATA, CLASSES, SAMPLES = "data.root", "data.num_classes", "train_samples"
"""Place of the data, and what differs with it if the images are others: packed ones have another place alone."""
SPEEDUP_TITLES = ("times as fast as the one before", "as the first")
"""Titles of the two columns of speedups()."""
NOT_COMPARED = ("run.seed", "compute.mode", "compute.mode_keeps", *RECORDING_KEYS)
"""Keys that a comparison ignores. A mode sets other keys, which are compared themselves."""
MODE, MODE_KEYS = "mode", {"compute.compile", "compute.cuda_graph"}
"""Fact of how the steps were computed, which says nothing more if one of the keys that set it differs."""
MAX_KEYS = 6
"""Cells that differ in more keys are labelled by the folder of their first run."""
RUN, SEED = "run", "seed"
OWN_TITLES = ("n", "loss", "epochs")
"""Columns of a comparison that a key's short name must not replace."""


@dataclass(frozen=True)
class Figures:
    """Results of one run. Seconds are of training steps: no start, no evaluation, no checkpoint."""

    epochs: float
    seconds: float
    images_per_second: float
    top1: float | None
    """Top-1 of the last evaluation; None for generated images."""
    loss: float | None
    reached_seconds: float | None
    """Seconds until the first evaluation that had the target; None if none had, or no target was named."""
    evaluation_seconds: float | None
    """Seconds of the last evaluation; None if its record does not state them."""
    resumed: int
    """Number of resumes from a checkpoint; each start warms up again, and its seconds include that."""
    num_rank_losses: int = 0
    rank_loss_seconds: float = 0.0
    """From a loss until the other ranks continue in place."""
    num_rank_joins: int = 0
    rank_join_seconds: float = 0.0


@dataclass(frozen=True)
class TrainedRun:
    name: str
    """Its folder, or its point."""
    config: Mapping[str, Any]
    """Values by key, such as optimizer.name, and facts without a key, such as device."""
    values: Mapping[str, Any]
    """Values that distinguish it from others, without the seed."""
    figures: Figures

    @property
    def seed(self) -> int:
        return int(self.config["run.seed"])


@dataclass(frozen=True)
class Cell:
    """The runs that differ only in their seeds, one for each seed."""

    values: Mapping[str, Any]
    runs: tuple[TrainedRun, ...]

    def values_of(self, name: str) -> list[float]:
        found = (getattr(run.figures, name) for run in self.runs)
        return [figure for figure in found if figure is not None]

    def mean(self, name: str) -> float | None:
        """Return the mean of a figure; None if no run has it."""
        found = self.values_of(name)
        return statistics.fmean(found) if found else None

    def deviation(self, name: str) -> float | None:
        """Return the sample standard deviation of a figure; None for fewer than two runs."""
        found = self.values_of(name)
        return statistics.stdev(found) if len(found) > 1 else None

    def median(self, name: str) -> float:
        """Return the median of a figure that all runs have."""
        return statistics.median(self.values_of(name))

    def record(self) -> dict[str, Any]:
        spreads = {
            f"{name}_{what}": getattr(self, what)(name) for name in ("top1", "loss") for what in ("mean", "deviation")
        }
        medians = {f"{name}_median": self.median(name) for name in ("epochs", "seconds", "images_per_second")}
        reached = self.values_of("reached_seconds")
        return {
            **self.values,
            "n": len(self.runs),
            "seeds": [run.seed for run in self.runs],
            **spreads,
            **medians,
            "reached_seconds_median": statistics.median(reached) if reached else None,
            "reached": len(reached),
        }


@dataclass(frozen=True)
class Comparison:
    title: str
    keys: tuple[str, ...]
    cells: tuple[Cell, ...]
    is_cumulative: bool = False
    target: float | None = None
    notes: tuple[str, ...] = ()
    """Sentences on runs that were separated or not counted."""

    @property
    def has_accuracy(self) -> bool:
        return any(cell.values_of("top1") for cell in self.cells)


@dataclass(frozen=True)
class Curves:
    """Values of one run by epoch."""

    loss: dict[float, float]
    top1: dict[float, float]


def read_figures(
    records: Iterable[Mapping[str, Any]], *, global_batch_size: int, target: float | None, is_generated: bool
) -> Figures:
    """Compute a run's figures from its records. Raises: ValueError if they have no training, or invalid figures.

    KeyError, TypeError, OverflowError or ZeroDivisionError if they are not records of a run.
    """
    seconds, step, epochs, starts = 0.0, 0, 0.0, 0
    times, waits = Counter[str](), Counter[str]()
    last: Mapping[str, Any] = {}
    reached = None
    for record in records:
        if record["kind"] == "start" and (kind := record.get("interruption")):  # the same processes continued
            times[kind] += 1
            waits[kind] += record["interruption_seconds"]
        elif record["kind"] == "start":
            starts += 1
        elif record["kind"] == "train":
            if record["step"] > step:  # steps that a restart repeats count once
                seconds += (record["step"] - step) * global_batch_size / record["images_per_second"]
                step, epochs = record["step"], record["epoch"]
        elif record["kind"] == "eval" and not is_generated:
            last = record
            if target is not None and reached is None and record["top1"] >= target:
                reached = seconds
    values = (last.get(key) for key in ("top1", "loss", "seconds"))
    top1, loss, evaluation = (None if each is None else float(each) for each in values)
    if not (0 < seconds < math.inf and 0 < epochs < math.inf and (top1 is None or 0 <= top1 <= 1)):
        raise ValueError(f"{seconds:g} s of training, {epochs:g} epochs, top-1 {top1}")
    rate = step * global_batch_size / seconds
    resumed, found = max(0, starts - 1), (float(last.get("epoch", epochs)), seconds, rate, top1, loss, reached)
    lost, joined = ((times[kind], float(waits[kind])) for kind in ("rank_loss", "rank_join"))
    return Figures(*found, evaluation, resumed, *lost, *joined)


def differing_keys(runs: Sequence[TrainedRun]) -> list[str]:
    keys = [key for key in _varying([run.config for run in runs]) if key not in NOT_COMPARED]
    return [key for key in keys if key != MODE or not MODE_KEYS & {*keys}]


def _varying(found: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = dict.fromkeys(key for each in found for key in each)
    return [key for key in keys if len({repr(each.get(key)) for each in found}) > 1]


def label_runs(runs: Sequence[TrainedRun], keys: Sequence[str]) -> list[TrainedRun]:
    """Label runs by these keys, of the experiment or of a sweep."""
    return [replace(run, values={key: run.config.get(key, run.values.get(key)) for key in keys}) for run in runs]


def compare_runs(
    title: str, runs: Sequence[TrainedRun], *, is_cumulative: bool = False, target: float | None = None
) -> Comparison:
    """Group runs that differ only in their seeds. The most accurate cell is first, without accuracy the fastest;
    cumulative cases keep their order.

    Values that are the same in all runs are left out. If runs of equal values differ in other keys, these distinguish
    cells as well. Of several runs with the same seed in a cell the first counts.
    """
    labels = _varying([run.values for run in runs])
    alike = group_runs(runs, lambda run: [run.values.get(key) for key in labels])
    own = list(dict.fromkeys(key for same in alike for key in differing_keys(same) if key not in labels))
    cells, repeats = [], list[str]()
    for same in (part for some in alike for part in group_runs(some, lambda run: [run.config.get(key) for key in own])):
        of_seed = {run.seed: run for run in reversed(same)}
        repeats += [run.name for run in same if run is not of_seed[run.seed]]
        found = {key: same[0].config.get(key) for key in own} if len(own) <= MAX_KEYS else {RUN: same[0].name}
        values = {key: same[0].values.get(key) for key in labels} | found
        cells.append(Cell(values, tuple(of_seed[seed] for seed in sorted(of_seed))))
    if not is_cumulative:
        figure = "top1" if any(cell.values_of("top1") for cell in cells) else "images_per_second"
        cells.sort(key=lambda cell: -(cell.mean(figure) or 0.0))
    is_split = own and any(run.values for run in runs)
    notes = [f"runs with equal values differ in {', '.join(own)}, so they are separate cells"] if is_split else []
    if repeats:
        notes.append(f"not counted, because they repeat settings and seed of another run: {', '.join(repeats)}")
    keys, said = tuple(cells[0].values) if cells else (), tuple(f"{title}: {note}." for note in notes)
    return Comparison(title, keys, tuple(cells), is_cumulative, target, said)


def group_runs(runs: Sequence[TrainedRun], key: Callable[[TrainedRun], list[Any]]) -> list[list[TrainedRun]]:
    """Group runs with equal keys, in the order of the first of each."""
    groups: dict[str, list[TrainedRun]] = {}
    for run in runs:
        groups.setdefault(repr(key(run)), []).append(run)
    return list(groups.values())


def comparison_table(found: Comparison) -> Table:
    """Make a row for each cell. Columns without information are left out."""
    short = [*OWN_TITLES, *map(short_key, found.keys)]
    titles = {key: short_key(key) if short.count(short_key(key)) == 1 else key for key in found.keys}
    columns = {titles[key]: [value_text(cell.values[key]) for cell in found.cells] for key in found.keys}
    columns["n"] = [_count(cell) for cell in found.cells]
    if found.has_accuracy:
        columns["top-1 (%)"] = [_spread(cell, "top1", scale=100, digits=2) for cell in found.cells]
        columns["loss"] = [_spread(cell, "loss", scale=1, digits=4) for cell in found.cells]
        columns["epochs"] = [f"{cell.median('epochs'):g}" for cell in found.cells]
    columns["training (s)"] = [_range(cell.values_of("seconds")) for cell in found.cells]
    if found.is_cumulative:
        texts = list(speedups([cell.median("seconds") for cell in found.cells]))
        columns |= {name: [each[index] for each in texts] for index, name in enumerate(SPEEDUP_TITLES)}
    columns["images/s"] = [f"{cell.median('images_per_second'):,.0f}" for cell in found.cells]
    if found.is_cumulative and any(cell.values_of("evaluation_seconds") for cell in found.cells):
        columns["an evaluation (s)"] = [_range(cell.values_of("evaluation_seconds")) for cell in found.cells]
    if found.target is not None:
        columns[f"to {percent(found.target)} (s)"] = [_to_target(cell) for cell in found.cells]
    return table_of(found.title, columns)


def best_of(found: Comparison) -> str:
    """Return a sentence on the most accurate cell and its lead, or that their data differ; may be empty.

    It is for cumulative cases, fewer than two cells, and cells of one run each: best_run_of names that run.
    """
    cells = [cell for cell in found.cells if cell.values_of("top1")]
    if len(cells) > 1 and (keys := different_data(found)):
        return f"{found.title}: different data ({', '.join(keys)} differ): accuracies cannot be compared."
    if found.is_cumulative or all(len(cell.runs) == 1 for cell in cells) or len(cells) < 2:
        return ""
    first, second = cells[:2]
    text = f"{found.title}: best is {cell_label(first)}, top-1 {_spread(first, 'top1', scale=100, digits=2)}%"
    errors = [cell.deviation("top1") for cell in (first, second)]
    if None in errors:
        return f"{text}; one seed says little about a difference."
    error = math.sqrt(sum((e or 0) ** 2 / len(cell.values_of("top1")) for e, cell in zip(errors, cells, strict=False)))
    ahead = (first.mean("top1") or 0.0) - (second.mean("top1") or 0.0)
    clearly = "" if ahead > 2 * error else ", within two standard errors"
    return f"{text} ({100 * ahead:.2f} points above {cell_label(second)}{clearly})."


def different_data(found: Comparison) -> list[str]:
    """Return the keys that show that runs were trained on different data; empty if none do."""
    keys = {*_varying([run.config for cell in found.cells for run in cell.runs])}
    is_other = CLASSES in keys or {DATA, SAMPLES} <= keys
    return [key for key in (DATA, CLASSES, SAMPLES) if key in keys and is_other]


def best_run_of(found: Comparison) -> str:
    """Return a sentence on the most accurate run; empty for fewer than two, or different data."""
    runs = [(run, cell) for cell in found.cells for run in cell.runs if run.figures.top1 is not None]
    if len(runs) < 2 or different_data(found):
        return ""
    run, cell = max(runs, key=lambda each: each[0].figures.top1 or 0.0)
    name = ", ".join(filter(None, (cell_label(cell) * (RUN not in cell.values), f"seed {run.seed}")))
    doubt = "; one seed says little about a difference" if all(len(cell.runs) == 1 for _, cell in runs) else ""
    return f"{found.title}: best run is {run.name} ({name}), top-1 {100 * (run.figures.top1 or 0.0):.2f}%{doubt}."


def cell_label(cell: Cell, *, without: str = "") -> str:
    """Write the values of a cell: a case without its key, others with their keys."""
    values = {key: value for key, value in cell.values.items() if key != without}
    return ", ".join(
        str(value)
        if key in (CASE, RUN) or (len(values) == 1 and isinstance(value, str))
        else f"{short_key(key)} {value_text(value)}"
        for key, value in values.items()
    )


def speedups(costs: Sequence[float]) -> Iterator[tuple[str, ...]]:
    """Yield for each cost how many times as fast it is as the one before, and as the first."""
    for before, cost in zip((*costs[:1], *costs[:-1]), costs, strict=True):
        yield tuple(f"{other / cost:.2f}" for other in (before, costs[0]))


def run_records(runs: Sequence[TrainedRun]) -> Iterator[dict[str, Any]]:
    keys = differing_keys(runs)
    labels = list(dict.fromkeys(key for run in runs for key in run.values if key not in keys))
    for run in runs:
        own = {key: run.values.get(key) for key in labels} | {key: run.config.get(key) for key in keys}
        yield {RUN: run.name, **own, SEED: run.seed, **vars(run.figures)}


def short_key(key: str) -> str:
    """Write schedule.base_lr -> base_lr; a key called name keeps its section."""
    section, _, name = key.rpartition(".")
    return section if name == "name" and section else name.replace("_", " ") if name == "global_batch_size" else name


def value_text(value: Any) -> str:
    if type(value) in (int, str):
        return str(value)
    return f"{value:.4g}" if isinstance(value, float) else as_yaml(value)


def _count(cell: Cell) -> str:
    resumed = sum(run.figures.resumed > 0 for run in cell.runs)
    text = f"{len(cell.runs)}{f', {resumed} resumed' if resumed else ''}"
    for thing, kind in (("rank loss", "num_rank_losses"), ("rank join", "num_rank_joins")):
        if number := sum(getattr(run.figures, kind) for run in cell.runs):
            seconds = sum(getattr(run.figures, f"{thing.replace(' ', '_')}_seconds") for run in cell.runs)
            text += f", {count(number, thing)} ({seconds:.1f} s)"
    return text


def _spread(cell: Cell, name: str, *, scale: float, digits: int) -> str:
    mean, deviation = cell.mean(name), cell.deviation(name)
    if mean is None:
        return ""
    return f"{scale * mean:.{digits}f}" + ("" if deviation is None else f" ± {scale * deviation:.{digits}f}")


def _range(found: Sequence[float]) -> str:
    """Write the median, and the range if there is more than one value."""
    if not found:
        return ""
    text = f"{statistics.median(found):,.1f}"
    return text if len(found) == 1 else f"{text} ({min(found):,.1f} to {max(found):,.1f})"


def _to_target(cell: Cell) -> str:
    reached = cell.values_of("reached_seconds")
    if not reached:
        return "not reached"
    rest = "" if len(reached) == len(cell.runs) else f", {len(reached)} of {len(cell.runs)} runs"
    return f"{statistics.median(reached):,.1f}{rest}"
