"""Read the results of sweeps and runs from their folders."""

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from bigbatch.errors import RunFolderError, UserError
from bigbatch.experiments.engine.folder import DONE, PENDING, SUBMITTED, SweepFolder
from bigbatch.experiments.engine.plan import RANKS, describe_values
from bigbatch.experiments.report.compare import MODE, Comparison, TrainedRun, compare_runs, read_figures
from bigbatch.files import RECORD_BYTES, TEXT_BYTES, parse_json, read_plain
from bigbatch.launch.efficiency import MeasuredPoint, Variant, median_step
from bigbatch.trainer.config.file import read_dumped
from bigbatch.trainer.config.schema import describe_step
from bigbatch.trainer.config.strict_yaml import parse_yaml
from bigbatch.trainer.folder.folder import RunDir, read_records
from bigbatch.trainer.report.cost import spent_by
from bigbatch.trainer.report.noise_scale import NOISE_SCALE_FIELDS
from bigbatch.words import is_number

CONDITIONS = ("device", "torch", "commit", "backend", "algorithm", "algorithm_why", "precision", "date")
MUST_BE_EQUAL = ("device", "torch", "commit", "mode")
"""If points differ in these, their speeds do not show scaling."""
FACTS = ("train_samples", "device", "torch", "bigbatch", "commit")
"""Facts of a run's newest start that its config does not state."""
INTERRUPTIONS = ("num_rank_losses", "rank_loss_seconds", "num_rank_joins", "rank_join_seconds")
WARM_UP_REPORTS = 1
"""Reports at a run's start that do not count: libraries choose their algorithms, and buffers are made."""


@dataclass(frozen=True)
class SweepResults:
    name: str
    folder: Path
    runs: tuple[TrainedRun, ...]
    measured: tuple[MeasuredPoint, ...]
    """Points on different numbers of ranks, for their efficiency; none if all have the same number."""
    unmeasured: tuple[tuple[str, str], ...]
    """Points without figures: their values, and why."""
    waiting: Mapping[str, int]
    """Number of points that are pending, or in Slurm's queue, by state."""
    is_gpu: bool
    is_cumulative: bool
    target: float | None
    conditions: dict[str, Any]

    def rerun_command(self, point: MeasuredPoint) -> str:
        return f"bigbatch sweep {shlex.quote(str(self.folder))} --again {','.join(map(str, point.numbers))}"

    @property
    def comparison(self) -> Comparison:
        title = f"Comparison: {self.name}"
        return compare_runs(title, self.runs, is_cumulative=self.is_cumulative, target=self.target)


@dataclass(frozen=True)
class Evaluated:
    """An evaluation and the run's cost until then. Times between two starts of a run do not count."""

    step: int
    epoch: float
    top1: float
    hours: float
    rank_hours: float
    joules: float | None
    """None if a driver did not measure it."""


@dataclass(frozen=True)
class ToAccuracy:
    """The evaluation in which one run reached a target, or its best one."""

    target: float
    reached: Evaluated | None
    best: Evaluated | None
    evaluations: tuple[Evaluated, ...]
    is_gpu: bool

    @property
    def shown(self) -> Evaluated | None:
        """Return the evaluation that reached the target, else the best one."""
        return self.reached or self.best


def to_accuracy(records: Iterable[dict[str, Any]], *, target: float | None) -> ToAccuracy:
    """Find in a run's records when it reached the target; without a target, its best top-1."""
    evaluations, is_gpu = [], False
    for record, spent in spent_by(records):
        if record["kind"] == "start":
            is_gpu = not str(record["job"].get("device", "cpu")).startswith("cpu")
        if record["kind"] == "eval":
            found = (record["step"], record["epoch"], record["top1"])
            evaluations.append(Evaluated(*found, spent.hours, spent.rank_hours, spent.joules))
    best = max(evaluations, key=lambda each: each.top1, default=None)
    goal = target if target is not None else best.top1 if best else 0.0
    reached = next((each for each in evaluations if each.top1 >= goal), None)
    return ToAccuracy(goal, reached, best, tuple(evaluations), is_gpu)


@dataclass(frozen=True)
class RunResults:
    folder: Path
    config: dict[str, Any]
    """Values by dotted key; keys that a later release added have their defaults."""
    conditions: dict[str, Any]

    def records(self) -> Iterator[dict[str, Any]]:
        """Yield its records. Raises: RunFolderError."""
        return read_records(RunDir(self.folder).metrics)

    @cached_property
    def noise_scale(self) -> dict[str, Any] | None:
        """Return the newest figures of its noise scale; None if none were measured. Raises: RunFolderError."""
        newest = None
        for record in self.records():
            if record["kind"] == "train" and record.get("noise_scale_low") is not None:
                newest = {name: record[name] for name in NOISE_SCALE_FIELDS}
        return newest

    @property
    def target(self) -> float | None:
        """Return the top-1 that the run's own config states."""
        return self.config["run.target_top1"]

    def to_accuracy(self, *, target: float | None) -> ToAccuracy:
        """Measure time to the stated target, or to the run's own. Raises: RunFolderError for a damaged folder."""
        try:
            return to_accuracy(self.records(), target=target if target is not None else self.target)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RunFolderError(f"{self.folder}: {describe_damage(error)}") from error

    def trained(self, *, target: float | None) -> TrainedRun | None:
        """Return its results so far; None if it has no figures yet. Raises: RunFolderError."""
        try:
            return _trained(RunDir(self.folder), self.config, values={}, target=target)
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError):
            return None


def read_folder(path: Path, *, target: float | None = None) -> SweepResults | RunResults:
    """Read a sweep, or a run. Raises: RunFolderError for anything else."""
    if (path / "sweep.yaml").is_file():
        return read_sweep_results(SweepFolder(path), target=target)
    run = RunDir(path)
    if run.config.is_file() and run.metrics.is_file():
        summary = _mapping(run.summary, parse_json) if run.summary.is_file() else {}
        return RunResults(path, _mapping(run.config, read_dumped), common_conditions([summary]))
    what = "holds neither a sweep (sweep.yaml) nor a run (config.yaml and metrics.jsonl)"
    raise RunFolderError(f"{path} {what if path.is_dir() else 'is not a folder'}: name the folder of a sweep or a run")


def read_sweep_results(folder: SweepFolder, *, target: float | None = None) -> SweepResults:
    """Read a sweep's results; seeds are measured together. Raises: RunFolderError, but not for a damaged point."""
    sweep = _mapping(folder.sweep, parse_yaml)
    target = target if target is not None else sweep.get("target_top1")
    states: dict[int, dict[str, Any]] = {}
    unmeasured: list[tuple[str, str]] = []
    fewest: dict[Variant, int] = {}
    for number in folder.numbers():
        try:
            state = folder.read_state(number)
            if not (type(state["ranks"]) is int and state["ranks"] > 0):
                raise ValueError(f"{state['ranks']} ranks")
            if state.get("index", number) is None:  # the sweep's file has changed since
                continue
            states[number] = state
        except (UserError, KeyError, TypeError, ValueError) as error:
            unmeasured.append((f"point {number}", str(error)))
            continue
        variant, ranks = _variant(state["values"]), states[number]["ranks"]
        fewest[variant] = min(ranks, fewest.get(variant, ranks))
    is_scaling = len({state["ranks"] for state in states.values()}) > 1 and all(
        "ranks" in state["values"] for state in states.values()
    )
    groups: dict[str, list[_PointRun]] = {}
    waiting: Counter[str] = Counter()
    for number, state in states.items():
        seed = f", seed {state['seed']}" if sweep.get("seeds", 1) != 1 and "seed" in state else ""
        shown = (describe_values(state["values"]) or f"point {number}") + seed
        if state["state"] in (PENDING, SUBMITTED) and not state["reason"]:
            waiting[state["state"]] += 1
            continue
        if state["state"] != DONE:
            unmeasured.append((shown, state["reason"] or state["state"]))
            continue
        try:
            point = _read_point(folder, number, state, target=target, is_scaling=is_scaling)
            groups.setdefault(json.dumps([state["values"], point.mode]), []).append(point)
        except UserError as error:
            unmeasured.append((shown, str(error)))
        except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            unmeasured.append((shown, describe_damage(error)))
    found = [each for repeats in groups.values() for each in repeats]
    found.sort(key=lambda each: int(each.state.get("index", each.state["number"])))
    commits = ", ".join(dict.fromkeys(str(each.trained.config.get("commit")) for each in found))
    # a commit in the middle of a sweep does not separate the seeds of a cell; differences() names it
    found = [
        replace(each, trained=replace(each.trained, config={**each.trained.config, "commit": commits}))
        for each in found
    ]
    summaries = [each.summary for each in found]
    conditions = common_conditions(summaries)
    found_modes = modes_of(found) if is_scaling else {}
    if mixed := sorted({mode for modes in found_modes.values() if len(modes) > 1 for mode in modes}):
        conditions["mode"] = f"DIFFER: {'; '.join(mixed)}"
    conditions |= {key: sweep[key] for key in ("config", "where", "launch", "options", "steps") if sweep.get(key)}
    return SweepResults(
        str(sweep.get("name")),
        folder.path,
        runs=tuple(each.trained for each in found),
        measured=tuple(_measure(repeats, fewest, found_modes) for repeats in groups.values() if is_scaling),
        unmeasured=tuple(unmeasured),
        waiting=waiting,
        is_gpu=not any(str(summary.get("device", "cpu")).startswith("cpu") for summary in summaries),
        is_cumulative=bool(sweep.get("cumulative")),
        target=target,
        conditions=conditions,
    )


@dataclass(frozen=True)
class _PointRun:
    state: dict[str, Any]
    trained: TrainedRun
    records: list[dict[str, Any]]
    """Reports from which speed is computed; empty unless the sweep is over numbers of ranks."""
    summary: dict[str, Any]
    global_batch_size: int
    nodes: int
    mode: str
    """How its steps were computed at its newest start."""

    @property
    def variant(self) -> Variant:
        return _variant(self.state["values"])


def modes_of(points: Iterable[_PointRun]) -> dict[Variant, dict[str, int]]:
    """Return the modes of each variant, with the fewest ranks of each: speeds of two modes show no scaling."""
    found: dict[Variant, dict[str, int]] = {}
    for each in points:
        modes, ranks = found.setdefault(each.variant, {}), each.state["ranks"]
        modes[each.mode] = min(ranks, modes.get(each.mode, ranks))
    return found


def _read_point(
    folder: SweepFolder, number: int, state: dict[str, Any], *, target: float | None, is_scaling: bool
) -> _PointRun:
    """Read the results of one point. Raises: RunFolderError; errors of reading damaged files."""
    run = folder.run(number)
    config = _mapping(run.config if run.config.is_file() else folder.config(number), read_dumped)
    reports, summary = train_records(run) if is_scaling else [], _mapping(run.summary, parse_json)
    trained = _trained(run, config, values=state["values"], target=target)
    size, nodes, mode = summary["global_batch_size"], summary["num_nodes"], trained.config[MODE]
    found = _PointRun(state, trained, reports, summary, size, nodes, mode)
    if is_scaling:
        _measure([found], {}, {})  # damaged content raises here
    return found


def _trained(run: RunDir, config: dict[str, Any], *, values: Any, target: float | None) -> TrainedRun:
    """Compute a run's results from its records. Raises: errors of reading damaged files."""
    job: dict[str, Any] = {}

    def records() -> Iterator[dict[str, Any]]:
        for record in read_records(run.metrics):
            if record["kind"] == "start":
                job.update(record.get("job", {}))
            yield record

    is_generated, size = config["data.loader"] == "synthetic", config["batch.global_batch_size"]
    figures = read_figures(records(), global_batch_size=size, target=target, is_generated=is_generated)
    summary = _mapping(run.summary, parse_json) if run.summary.is_file() else {}
    # a later start from the same step has replaced the record of a former one
    figures = replace(figures, **{name: summary[name] for name in INTERRUPTIONS if is_number(summary.get(name))})
    known = job | summary
    facts = {RANKS: known.get("world_size"), **{key: known.get(key) for key in FACTS}}
    # a run may fall back from what its config states
    stated = describe_step(compiles=config["compute.compile"] is not None, has_graph=config["compute.cuda_graph"])
    facts |= {MODE: str(job.get("mode", stated))}
    facts |= {"state": "finished" if summary else "unfinished", "run.seed": int(config["run.seed"])}
    return TrainedRun(str(run.path), config | facts, dict(values), figures)


def _variant(values: dict[str, Any]) -> Variant:
    """Return all values but the number of ranks; those that cannot be hashed as JSON."""
    return tuple(
        (key, value if isinstance(value, str | int | float | bool | None) else json.dumps(value))
        for key, value in values.items()
        if key != "ranks"
    )


def _measure(
    repeats: Sequence[_PointRun], fewest_ranks: Mapping[Variant, int], modes: Mapping[Variant, Mapping[str, int]]
) -> MeasuredPoint:
    first, variant = repeats[0], repeats[0].variant
    fewest, modes_here = fewest_ranks.get(variant, 1), modes.get(variant, {})
    if len(modes_here) > 1:
        variant, fewest = (*variant, ("mode", first.mode)), modes_here[first.mode]
    records = [record for each in repeats for record in each.records]
    joules = [record.get("energy_joules") for record in records]
    known = [each for each in joules if each is not None]
    images = sum(record["steps"] * each.global_batch_size for each in repeats for record in each.records)
    return MeasuredPoint(
        variant,
        ranks=first.state["ranks"],
        nodes=first.nodes,
        global_batch_size=first.global_batch_size,
        step=median_step(records, global_batch_size=first.global_batch_size),
        rates=tuple(record["images_per_second"] for record in records),
        fewest_ranks=fewest,
        joules_per_image=sum(known) / images if len(known) == len(joules) else None,
        device=" and ".join(sorted({str(each.summary.get("device", "unknown")) for each in repeats})),
        numbers=tuple(each.state["number"] for each in repeats),
    )


def common_conditions(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the conditions of the figures: DIFFER and all values if points differ in one; a range for dates."""
    found = {}
    for key in CONDITIONS:
        values = list(dict.fromkeys(str(summary[key]) for summary in summaries if key in summary))
        if values:
            found[key] = values[0] if len(values) == 1 else f"DIFFER: {'; '.join(values)}"
    if dates := sorted(str(summary["date"]) for summary in summaries if "date" in summary):
        found["date"] = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return found


def differences(conditions: dict[str, Any]) -> list[str]:
    """Return a line for each condition that makes speeds incomparable, with its values."""
    return [
        f"The points are not comparable: {key} differs ({str(conditions[key]).removeprefix('DIFFER: ')})."
        for key in MUST_BE_EQUAL
        if str(conditions.get(key, "")).startswith("DIFFER: ")
    ]


def train_records(run: RunDir) -> list[dict[str, Any]]:
    """Return the newest start's reports without the first, each with its number of steps. Raises: RunFolderError."""
    records: list[dict[str, Any]] = []
    for record in read_records(run.metrics):
        if record["kind"] == "start":
            records = []
        elif record["kind"] == "train":
            records.append(record)
    found = records[WARM_UP_REPORTS:]
    if not found:
        raise RunFolderError(f"fewer than {WARM_UP_REPORTS + 1} log records: raise steps, or lower run.log_every_steps")
    if not all(isinstance(record.get("step"), int) for record in records):
        raise RunFolderError(f"{run.metrics} is damaged: a report without its step")
    # a whole number may be longer than a float
    rates = [record.get("images_per_second") for record in found]
    if not all(isinstance(rate, int | float) and 0 < rate <= sys.float_info.max for rate in rates):
        raise RunFolderError(f"{run.metrics} is damaged: a report without a valid rate")
    return [
        record | {"steps": record["step"] - before["step"]}
        for before, record in pairwise(records[WARM_UP_REPORTS - 1 :])
    ]


def describe_damage(error: Exception) -> str:
    met = f"{error} is missing" if isinstance(error, KeyError) else f"{type(error).__name__} {error}"
    return f"its files are damaged: {met}"


def _mapping(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Read the mapping of a JSON or YAML file. Raises: RunFolderError."""
    try:
        found = parse(read_plain(path, most=RECORD_BYTES if parse is parse_json else TEXT_BYTES).decode())
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise RunFolderError(f"{path} is not readable: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise RunFolderError(f"{path} holds no keys and values")
    return found
