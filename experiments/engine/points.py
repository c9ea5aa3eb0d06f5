"""The points of a sweep: each a complete experiment, and the ranks that train it. Pure but for reading configs."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.cores import usable_cores
from bigbatch.errors import ConfigError, LaunchOptionError
from bigbatch.experiments.engine.plan import BATCH, CASE, RANKS, RATE, SCALING, SweepPlan, describe_values, overridden
from bigbatch.launch.jobs.validation import parse_hosts, read_hostfile
from bigbatch.paths import as_path
from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.batch_remedy import largest_divisor
from bigbatch.trainer.config.file import read_experiment
from bigbatch.trainer.config.schema import Config, lookup, typed
from bigbatch.trainer.config.short_run import shorten
from bigbatch.words import count

EARLY_STOP_KEYS = ("run.target_top1", "run.stop_metric", "run.stop_after_evaluations")
"""Keys that end a run early. They count only if the sweep states them: runs of different lengths cannot be compared."""
WHEN_EVALUATED = ("eval_every_epochs", "eval_offset_epochs")
NUM_REPORTS = 8
"""Reports of a point that measures speed; the first one does not count."""
SPEED_SETTINGS = {
    "data.loader": "synthetic",
    "run.checkpoint_every_steps": 0,
    "run.eval_every_epochs": 1,
    "run.eval_offset_epochs": 0,
    "schedule.warmup_epochs": 0,
    "schedule.decay_epochs": None,
}
"""Settings of points that measure speed, unless the sweep states them."""


@dataclass(frozen=True)
class Point:
    """A point is one training: a complete experiment, and where it runs."""

    number: int
    values: dict[str, Any]
    """What distinguishes it from the others, without the seed: its case, and values of the grid."""
    seed: int
    ranks: int
    ranks_per_node: int
    nodes: int
    config: Config
    machine_keys: tuple[str, ...] = ()
    """Keys whose values follow from this machine; a continued sweep keeps the values that it began with."""
    is_seeded: bool = False
    """True if other points differ from it only in their seeds."""
    awaits_search: bool = False
    """True if the sweep tunes its case, and has not found the values yet."""

    @property
    def title(self) -> str:
        """Return its name in loggers: case and other values, batch and seed."""
        others = {key.rpartition(".")[2]: value for key, value in self.values.items() if key not in (CASE, BATCH)}
        case, batch = self.values.get(CASE, ""), self.config.batch.global_batch_size
        return ", ".join(filter(None, (case, describe_values(others), f"batch={batch}", f"seed={self.seed}")))

    def describe(self) -> str:
        values = {**self.values, **({"seed": self.seed} if self.is_seeded else {})}
        return describe_values(values) or "the only one"


@dataclass(frozen=True)
class Combination:
    """A case and values of the grid: the points of a sweep that differ only in their seeds."""

    case: str
    changes: Mapping[str, Any]
    """Keys that the case changes."""
    chosen: Mapping[str, Any]
    """Values of the grid."""

    @property
    def values(self) -> dict[str, Any]:
        return {**({CASE: self.case} if self.case else {}), **self.chosen}


def combinations(plan: SweepPlan) -> list[Combination]:
    """List the cases of a plan, each with all combinations of its grid."""
    grid = itertools.product(*plan.grid.values())
    return [
        Combination(name, changes, dict(zip(plan.grid, chosen, strict=True)))
        for (name, changes), chosen in itertools.product(plan.changes(), grid)
    ]


def make_points(
    plan: SweepPlan, *, folder: Path, tuned: Mapping[int, Mapping[str, Any] | None] | None = None
) -> list[Point]:
    """Make all points: cases, each with all combinations of the grid; then the same with the next seed.

    In strong scaling every number of ranks has the experiment's global batch; in weak scaling the global batch is one
    microbatch per rank. A microbatch or batch-norm span that does not fit a rank's share becomes the largest that does.
    tuned: values that a search found, by the index of the combination; None if it has not ended.
    Reads each file once, for any number of points. Raises: ConfigError, a line for each reason why points cannot be
    trained.
    """
    maker = PointBuilder(plan, folder)
    points: list[Point] = []
    wrong = PointRefusals()
    all_combinations, tuned = combinations(plan), tuned or {}
    firsts: dict[int, Point] = {}
    for number in range(plan.seeds * len(all_combinations)):
        repeat, index = divmod(number, len(all_combinations))
        combination, best = all_combinations[index], tuned.get(index, {})
        try:
            if index not in firsts:
                first = maker.make(number, combination, best or {})
                firsts[index] = dataclasses.replace(first, awaits_search=best is None)
            points.append(maker.repeat(firsts[index], number, repeat=repeat))
        except (ConfigError, LaunchOptionError) as error:
            wrong.add(error, number, combination.values)
    wrong.raise_all(plan.seeds * len(all_combinations))
    return points


class PointRefusals:
    """Collects the points that cannot be trained, by their reason."""

    def __init__(self) -> None:
        self._points: dict[str, list[str]] = {}

    def add(self, error: Exception, number: int, values: Mapping[str, Any]) -> None:
        what = f" ({described})" if (described := describe_values(values)) else ""
        self._points.setdefault("; ".join(map(str, error.args)), []).append(f"{number}{what}")

    def raise_all(self, num_points: int) -> None:
        """Raise ConfigError if there are any: a line for each reason."""
        lines = [
            f"  point {first}{f' and {len(others)} more' if others else ''}: {error}"
            for error, (first, *others) in self._points.items()
        ]
        if lines:
            raise ConfigError(
                f"{sum(map(len, self._points.values()))} of {num_points} points cannot be trained:", *lines
            )


class PointBuilder:
    """Makes points of one plan; reads its experiment once."""

    def __init__(self, plan: SweepPlan, folder: Path) -> None:
        self._plan, self._folder = plan, folder
        self._experiment = read_experiment(plan.config)
        self._base = self._experiment.with_values({}).config
        self._hosts = _hosts(plan)
        of_cases = (own[RANKS] for own in plan.cases.values() if RANKS in own)
        self._ranks = set(plan.grid.get(RANKS) or [plan.ranks, *of_cases])
        self._cores = _cores_per_rank(plan, self._ranks)
        # the global batch for which the learning rates are stated: `scale` scales them from it
        self._batch = plan.grid.get(BATCH, [plan.options.get(BATCH, self._base.batch.global_batch_size)])[0]
        if plan.steps is not None and plan.options.get("data.loader", "synthetic") != "synthetic":
            raise ConfigError(f"steps: {plan.steps} measures speed on generated tensors: remove data.loader or steps")

    def make(self, number: int, combination: Combination, tuned: Mapping[str, Any]) -> Point:
        """Make the first point of a combination, with tuned values. Raises: ConfigError; LaunchOptionError."""
        plan, base, case = self._plan, self._base, combination.changes
        stated = overridden(plan.options, case, combination.chosen, tuned)
        ranks, scaling = stated.pop(RANKS, plan.ranks), stated.pop(SCALING, None)
        per_node = min(ranks, plan.ranks_per_node or ranks)
        if ranks % per_node:
            raise LaunchOptionError(
                f"{count(ranks, 'rank')} cannot fill nodes of {per_node}; take a multiple, or other ranks_per_node"
            )

        def value(key: str) -> Any:
            return stated.get(key, lookup(base, key))

        microbatch = value("batch.microbatch_size")
        total = microbatch * ranks if scaling == "weak" else value(BATCH)
        own = _fit(total, ranks=ranks, microbatch_size=microbatch, bn_span=value("batch.bn_span"))
        own["run.directory"] = _run_directory(self._folder, number)
        if value("run.resume") == "never":  # a point that was stopped continues
            own["run.resume"] = "auto"
        if plan.scale is not None and not {BATCH, RATE} <= case.keys():  # a case with both has the rate of its batch
            factor = total / self._batch
            own[RATE] = value(RATE) * (factor if plan.scale == "linear" else math.sqrt(factor))
        machine: dict[str, Any] = {}
        if self._cores and base.compute.cpu_threads is None and "compute.cpu_threads" not in stated:
            machine["compute.cpu_threads"] = self._cores
        if len(self._ranks) > 1 and value("compute.mode") == "auto":
            # one mode for all numbers of ranks: that of the most, which have the fewest images each
            machine["compute.mode"] = max(1, total // (ranks if scaling == "weak" else max(self._ranks)))
        overrides = {**self._defaults(total), **stated, **own, **machine}
        held = {key: typed(key, each) for key, each in overrides.items()}
        config = self._experiment.with_values(held).config
        accumulation_steps(config.batch, world_size=ranks)
        if plan.steps is None:
            config = self._whole(config, stated)
        nodes = len(dict.fromkeys(self._hosts[:ranks])) or (1 if plan.where in ONE_HOST else ranks // per_node)
        values, seed = combination.values, config.run.seed
        return Point(number, values, seed, ranks, per_node, nodes, config, tuple(machine), plan.seeds > 1)

    def repeat(self, first: Point, number: int, *, repeat: int) -> Point:
        """Return a copy of a point with a later seed, without building its config again. Raises: ConfigError."""
        point, seed = with_number(first, number, folder=self._folder), first.seed + repeat
        run = dataclasses.replace(point.config.run, seed=seed)
        return dataclasses.replace(point, seed=seed, config=dataclasses.replace(point.config, run=run))

    def _defaults(self, total: int) -> dict[str, Any]:
        """Return settings that the sweep adds unless its file states them."""
        plan, early = self._plan, dict.fromkeys(EARLY_STOP_KEYS)
        if plan.steps is None:
            each = {"run.eval_every_epochs": 1, "run.eval_offset_epochs": 0} if plan.target_top1 is not None else {}
            return {**early, **each}
        size = {"run.epochs": 1, "data.num_synthetic_samples": plan.steps * total}
        return {**early, **SPEED_SETTINGS, "run.log_every_steps": max(1, plan.steps // NUM_REPORTS), **size}

    def _whole(self, config: Config, stated: Mapping[str, Any]) -> Config:
        if self._plan.epochs is None or self._plan.epochs == config.run.epochs:
            return config
        ends: dict[str, Any] = {key.partition(".")[2]: lookup(config, key) for key in EARLY_STOP_KEYS}
        ends_early = any(ends.values())
        each = self._plan.target_top1 is not None or ends_early
        short = shorten(config, epochs=self._plan.epochs, evaluate_each=each, directory=Path(config.run.directory))
        kept = ends if ends_early else {}
        kept |= {key: lookup(config, f"run.{key}") for key in WHEN_EVALUATED if f"run.{key}" in stated}
        return dataclasses.replace(short, run=dataclasses.replace(short.run, **kept)) if kept else short


def with_number(point: Point, number: int, *, folder: Path) -> Point:
    """Return a copy of a point in another place of its sweep's folder."""
    run = dataclasses.replace(point.config.run, directory=_run_directory(folder, number))
    return dataclasses.replace(point, number=number, config=dataclasses.replace(point.config, run=run))


def _run_directory(folder: Path, number: int) -> str:
    return str(folder / "points" / str(number) / "run")


ONE_HOST = ("local", "mpirun", "torchrun")


def _cores_per_rank(plan: SweepPlan, ranks: set[int]) -> int | None:
    """Return the CPU threads of each rank, for all points: this host's cores divided by the most ranks of a point.

    With more threads each, fewer ranks would seem faster. None if all points have the same number of ranks, or other
    hosts, whose cores are unknown.
    """
    if plan.has_other_hosts or len(ranks) == 1:
        return None
    return max(1, len(usable_cores()) // max(ranks))


def _hosts(plan: SweepPlan) -> list[str]:
    """Return the host of each rank, as mpirun fills one after the other; empty if no hosts are stated.

    Raises: LaunchOptionError.
    """
    hosts = parse_hosts(str(plan.launch["hosts"])) if "hosts" in plan.launch else ()
    hosts += read_hostfile(as_path(str(plan.launch["hostfile"]))) if "hostfile" in plan.launch else ()
    return [host for host, slots in hosts for _ in range(slots)]


def _fit(total: int, *, ranks: int, microbatch_size: int, bn_span: int) -> dict[str, Any]:
    """Return batch, microbatch and batch-norm span for this many ranks. Raises: LaunchOptionError."""
    if total < ranks:
        raise LaunchOptionError(f"a batch of {total} has fewer images than {ranks} ranks")
    # ranks that do not divide the batch take unequal numbers of microbatches
    whole = total if total % ranks else total // ranks
    microbatch = largest_divisor(whole, min(microbatch_size, total // ranks))
    span = bn_span if bn_span % microbatch_size == 0 and bn_span > microbatch_size else None
    return {
        BATCH: total,
        "batch.microbatch_size": microbatch,
        "batch.bn_span": span or largest_divisor(microbatch, bn_span),
    }
