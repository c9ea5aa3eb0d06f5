"""How fast what an ablation trained answers, form by form, each on top of those before it: by `bigbatch evaluate`."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from bigbatch.files import parse_json, read_plain
from bigbatch.interpreter import bigbatch_argv
from bigbatch.launch.ablate.plan import STEP, Ablation
from bigbatch.launch.ablate.results import GAINS, gains, reasons
from bigbatch.launch.sweep.folder import DONE, SweepFolder, state_of
from bigbatch.launch.sweep.job_log import find_reason
from bigbatch.launch.sweep.points import Point
from bigbatch.launch.sweep.running import Interrupted, run_logged
from bigbatch.launch.tables import Table
from bigbatch.trainer.config.schema import lookup
from bigbatch.trainer.config.strict_yaml import as_yaml
from bigbatch.trainer.config.trust import import_paths


@dataclass(frozen=True)
class FormResult:
    """A form has what `bigbatch evaluate` told of each run, and reasons why it told nothing of others."""

    name: str
    words: tuple[str, ...]
    """Those of the forms before it, too."""
    images_per_second: tuple[float, ...]
    """Of the model alone."""
    top1: tuple[float, ...]
    undone: tuple[str, ...]


@dataclass(frozen=True)
class Inference:
    """Inference is that of the runs of a step, in some forms."""

    step: str
    forms: tuple[FormResult, ...]


def measure(ablation: Ablation, points: Sequence[Point], folder: SweepFolder) -> Inference | None:
    """Evaluate the runs of the last step that has any, where that was not done; None where nothing is to be done.

    Forms take turns on each run. Raises: Interrupted; RunFolderError.
    """
    done = [point for point in points if state_of(folder, point.number) == DONE]
    if not done or not ablation.inference:
        return None
    step = max((point.values[STEP] for point in done), key=list(ablation.steps).index)
    found: dict[str, list[tuple[float, float] | str]] = {name: [] for name in ablation.inference}
    words = dict(zip(ablation.inference, accumulate(map(tuple, ablation.inference.values())), strict=True))
    for point in (each for each in done if each.values[STEP] == step):
        for name in words:
            # what was measured with other words does not count
            log = folder.point(point.number) / f"evaluate{''.join(words[name])}.txt".replace("/", "_")
            # stated again: a run folder's own word for what is imported does not count
            imported = dict.fromkeys(key for key, _ in import_paths(point.config))
            stated = [f"--{key}={as_yaml(lookup(point.config, key))}" for key in imported]
            run = str(folder.run(point.number).path)
            argv = [*bigbatch_argv(), "evaluate", run, *stated, *words[name], "--json"]
            found[name].append(_told(log) or _evaluate(argv, log=log, seconds=60 * ablation.timeout_minutes))
    return Inference(step, tuple(_result(name, words[name], each) for name, each in found.items()))


def _evaluate(argv: Sequence[str], *, log: Path, seconds: float) -> tuple[float, float] | str:
    code, ended_by = run_logged(argv, log=log, seconds=seconds)
    if ended_by == "person":
        raise Interrupted
    return _told(log) or find_reason(log, exit_code=code)


def _told(log: Path) -> tuple[float, float] | None:
    """Return images per second of the model alone and top-1 by the record that ends a log; None of one without."""
    try:
        record = parse_json(read_plain(log).splitlines()[-1])
        rate, top1 = float(record["model_images_per_second"]), float(record["top1"])
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return (rate, top1) if rate > 0 else None


def _result(name: str, words: tuple[str, ...], found: Sequence[tuple[float, float] | str]) -> FormResult:
    told = [each for each in found if not isinstance(each, str)]
    undone = tuple(each for each in found if isinstance(each, str))
    return FormResult(name, words, tuple(rate for rate, _ in told), tuple(top1 for _, top1 in told), undone)


def make_table(inference: Inference) -> Table:
    """Make a table with a row for each form. Its gain is in images per second, over those before it."""
    head: tuple[str, ...] = ("form", "runs", "images/s of the model, median", "lowest to highest")
    head += (*GAINS, "top-1, mean")
    told = [form.images_per_second for form in inference.forms if form.images_per_second]
    gained = gains([1 / statistics.median(rates) for rates in told])
    rows = []
    for form in inference.forms:
        rates, why = form.images_per_second, reasons(form.undone)
        if not rates:
            rows.append((form.name, f"0: {why}", *("",) * (len(head) - 2)))
            continue
        runs = f"{len(rates)}, {len(form.undone)} not: {why}" if why else str(len(rates))
        speeds = (f"{statistics.median(rates):,.0f}", f"{min(rates):,.0f} to {max(rates):,.0f}")
        rows.append((form.name, runs, *speeds, *next(gained), f"{100 * statistics.fmean(form.top1):.2f}%"))
    return Table(f"Inference with what {inference.step} trained", head, tuple(rows))
