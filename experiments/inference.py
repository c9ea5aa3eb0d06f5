"""Measure inference with a sweep's trained runs by `bigbatch evaluate`, in forms: each adds options to those before."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from bigbatch.errors import printable
from bigbatch.experiments.engine.engine import run_command
from bigbatch.experiments.engine.folder import DONE, SweepFolder
from bigbatch.experiments.engine.plan import CASE, SweepPlan, describe_values
from bigbatch.experiments.engine.points import Point
from bigbatch.experiments.report.compare import SPEEDUP_TITLES, speedups
from bigbatch.files import parse_json, read_end
from bigbatch.interpreter import bigbatch_argv
from bigbatch.launch.tables import Table
from bigbatch.tools.child import find_reason
from bigbatch.trainer.config.schema import lookup
from bigbatch.trainer.config.strict_yaml import as_yaml
from bigbatch.trainer.config.trust import import_paths

Measured = tuple[float, float]
"""Images per second of the model alone, and top-1."""


@dataclass(frozen=True)
class Inference:
    """Results of each form for the runs of one case that differ only in their seeds, or why it gave none."""

    cells: dict[str, dict[str, list[Measured | str]]]
    """What trained the runs, such as a case -> form -> results."""

    @property
    def undone(self) -> bool:
        return any(isinstance(one, str) for forms in self.cells.values() for found in forms.values() for one in found)

    @property
    def tables(self) -> list[Table]:
        return [self._table(f"Inference with what {cell} trained", forms) for cell, forms in self.cells.items()]

    def _table(self, title: str, forms: dict[str, list[Measured | str]]) -> Table:
        """Return a table with a row for each form; its gains are over the form before it, and over the first one."""
        head = ("form", "runs", "images/s of the model, median", "lowest to highest", *SPEEDUP_TITLES, "top-1, mean")
        measured = {name: [each for each in found if not isinstance(each, str)] for name, found in forms.items()}
        gained = speedups([1 / statistics.median(rate for rate, _ in each) for each in measured.values() if each])
        rows: list[tuple[str, ...]] = []
        for name, found in forms.items():
            why = "; ".join(dict.fromkeys(each for each in found if isinstance(each, str)))
            runs = f"{len(measured[name])}, {len(found) - len(measured[name])} not: {why}" if why else str(len(found))
            if not measured[name]:
                rows.append((name, runs, *("",) * (len(head) - 2)))
                continue
            rates, top1 = zip(*measured[name], strict=True)
            speeds = (f"{statistics.median(rates):,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}")
            rows.append((name, runs, *speeds, *next(gained), f"{100 * statistics.fmean(top1):.2f}%"))
        return Table(title, head, tuple(rows))


def measure(plan: SweepPlan, points: Sequence[Point], folder: SweepFolder) -> Inference | None:
    """Evaluate the finished runs of the last case that has any; None if there is none, or the plan states no form.

    Each run is evaluated in all forms; results of earlier calls are kept. Raises: Interrupted; RunFolderError.
    """
    done = [point for point in points if folder.state_of(point.number) == DONE]
    if not done or not plan.inference:
        return None
    cases = [name for name, _ in plan.changes()]
    case = max((point.values.get(CASE, "") for point in done), key=cases.index)
    cells: dict[str, dict[str, list[Measured | str]]] = {}
    words = dict(zip(plan.inference, accumulate(map(tuple, plan.inference.values())), strict=True))
    for point in (each for each in done if each.values.get(CASE, "") == case):
        others = describe_values({key: value for key, value in point.values.items() if key != CASE})
        cell = ", ".join(filter(None, (case, others))) or "the sweep"
        for name in words:
            # a result measured with other words does not count
            log = folder.point(point.number) / f"evaluate{''.join(words[name])}.txt".replace("/", "_")
            # stated on the command line: import paths in a run folder are not trusted
            imported = dict.fromkeys(key for key, _ in import_paths(point.config))
            stated = [f"--{key}={as_yaml(lookup(point.config, key))}" for key in imported]
            run, own = folder.run(point.number).path, log.with_suffix("")  # the run's evaluation stays
            argv = [*bigbatch_argv(), "evaluate", "--out", str(own), str(run), *stated, *words[name], "--json"]
            found = cells.setdefault(cell, {}).setdefault(name, [])
            found.append(_read_result(log) or _evaluate(argv, log, folder, minutes=plan.timeout_minutes))
    return Inference(cells)


def _evaluate(argv: Sequence[str], log: Path, folder: SweepFolder, *, minutes: float | None) -> Measured | str:
    code = run_command(argv, log=log, within=folder.path, seconds=None if minutes is None else 60 * minutes)
    return _read_result(log) or printable(find_reason(read_end(log), exit_code=code))


def _read_result(log: Path) -> Measured | None:
    """Return the result in a log's last record; None if there is none."""
    try:
        record = parse_json(read_end(log).splitlines()[-1])
        rate, top1 = float(record["model_images_per_second"]), float(record["top1"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return (rate, top1) if rate > 0 else None
