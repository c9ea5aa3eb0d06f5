"""The `search:` section of a sweep's file: tunes keys inside each case, so that each is compared at its best.

Each combination of a case and values of the grid has its own search, with equal trials, epochs and seed (decision 034).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from bigbatch.errors import ConfigError, LaunchOptionError, print_line
from bigbatch.experiments.engine.folder import SweepFolder, values_of
from bigbatch.experiments.engine.growth import identity
from bigbatch.experiments.engine.plan import MAX_POINTS, RATE, SweepPlan, conform_all, dump_plan
from bigbatch.experiments.engine.points import Combination, Point, PointBuilder, combinations, with_number
from bigbatch.experiments.report.tuned import SearchResult, read_searches, write_searches
from bigbatch.experiments.search.rounds import Rounds, held_values, run_rounds
from bigbatch.experiments.search.space import Axis, parse_axis
from bigbatch.experiments.search.study import Metric, best_record, common_reason, import_optuna
from bigbatch.files import make_folder
from bigbatch.trainer.config.file import parse_overrides
from bigbatch.trainer.folder.folder import writing
from bigbatch.words import count

LATER_SEED = MAX_POINTS
"""Added to the experiment's seed for all trials: no point of the sweep has the seed by which its values were chosen."""


@dataclass(frozen=True, kw_only=True)
class SearchSection:
    """The keys of the section."""

    trials: int
    """Trials of each search."""
    space: dict[str, Any] = field(default_factory=dict)
    """KEY: RANGE for all cases, in the forms of bigbatch tune search."""
    cases: dict[str, Any] = field(default_factory=dict)
    """The same by case; replaces a range of space."""
    epochs: int | None = None
    """Epochs of each trial; null: those of a point."""
    rounds: int = 1
    metric: Metric = "top1"

    def ranges(self, case: str) -> dict[str, str]:
        return {str(key): str(text) for key, text in (self.space | self.cases.get(case, {})).items()}


@dataclass(frozen=True)
class CaseSearch:
    """The search of one combination of a case and values of the grid."""

    values: dict[str, Any]
    space: dict[str, str]
    folder: SweepFolder
    epochs: int
    """Epochs of each trial."""
    rounds: Rounds
    probes: tuple[Point, ...]
    """Trials at the ends of the ranges."""
    result: SearchResult | None
    """None until it has ended."""

    @property
    def best(self) -> dict[str, Any] | None:
        """Return the best values as a config holds them; None if there are none yet."""
        return _typed(self.result.best_values) if self.result and self.result.best is not None else None

    def run(self) -> SearchResult:
        """Run the trials that are left. Raises: Interrupted; TuneError; RunFolderError."""
        with writing(self.folder.path):
            make_folder(self.folder.path, within=self.folder.path.parents[1])
        self.folder.prepare(self.rounds.plan, [])
        records = run_rounds(self.rounds, self.folder)[: self.rounds.trials]
        best = best_record(records, metric=self.rounds.metric)
        return SearchResult(
            values=self.values,
            folder=self.folder.path.name,
            epochs=self.epochs,
            metric=self.rounds.metric,
            space=self.space,
            trials=[{"values": each.values, "state": each.state, "result": each.result} for each in records],
            best=None if best is None else records.index(best),
            edges=[axis.key for axis in self.rounds.axes if best and axis.is_edge(best.values[axis.key])],
            reason="" if best else common_reason(records),
        )


def read_section(plan: SweepPlan) -> SearchSection:
    """Check the section. Raises: ConfigError, a line for each mistake."""
    held, wrong = conform_all(plan.search, SearchSection, where="search")
    section = SearchSection(**({"trials": 1} | held))
    if "trials" not in plan.search:
        wrong.append("search: trials is missing: state how many each case gets, such as 12")
    wrong += _mistakes(plan, section)
    if wrong:
        raise ConfigError(*wrong)
    return section


def _mistakes(plan: SweepPlan, section: SearchSection) -> Iterator[str]:
    for name in ("trials", "epochs", "rounds"):
        if (number := getattr(section, name)) is not None and number < 1:
            yield f"search: {name}: {number} must be a number from 1 on"
    if 0 < section.trials < section.rounds:
        yield f"search: rounds: {section.rounds} exceed trials: {section.trials}: each round needs a trial"
    cases = [name for name, _ in plan.changes()]
    for name, own in section.cases.items():
        if name not in cases or not isinstance(own, dict):
            yield f"search: cases: {name!r} must be one of {', '.join(cases)}, with a range for each of its keys"
    if any(not isinstance(own, dict) for own in section.cases.values()):
        return
    for name, changes in plan.changes():
        ranges = section.ranges(name)
        if not ranges:
            yield f"search: case {name} has no key to tune, and would have no trials: state its range in search.space"
        for key in ranges:
            stated = {"options": plan.options, "grid": plan.grid, f"case {name}": changes}
            yield from (f"search: {key} is also in {where}: keep one" for where, keys in stated.items() if key in keys)
        if RATE in ranges and plan.scale is not None:
            yield f"search: {RATE} is tuned at each batch, so scale: {plan.scale} has no effect: remove one of the two"


def _axes(ranges: Mapping[str, str], *, case: str) -> tuple[Axis, ...]:
    where = f"search: {case}:" if case else "search:"
    return tuple(parse_axis(f"{key}={text}", where) for key, text in ranges.items())


def make_searches(plan: SweepPlan, folder: SweepFolder, *, parallel: int) -> list[CaseSearch]:
    """Make the search of each combination, in the order of the points. Raises: ConfigError."""
    section = read_section(plan)
    # a target would evaluate each epoch, and a search stops no trial early
    trained = replace(plan, epochs=section.epochs or plan.epochs, seeds=1, target_top1=None, search={}, inference={})
    builder = PointBuilder(trained, folder.path)
    known = {(each.folder, len(each.trials)): each for each in read_searches(folder.path)}
    searches, wrong = [], list[str]()
    for combination in combinations(plan):
        try:
            searches.append(_make_search(section, trained, combination, builder, folder.path, parallel=parallel))
        except (ConfigError, LaunchOptionError) as error:
            wrong += map(str, error.args)
    if wrong:
        raise ConfigError(*dict.fromkeys(wrong))
    return [replace(each, result=known.get((each.folder.path.name, section.trials))) for each in searches]


def _make_search(
    section: SearchSection,
    plan: SweepPlan,
    combination: Combination,
    builder: PointBuilder,
    folder: Path,
    *,
    parallel: int,
) -> CaseSearch:
    """Make a search that has not started; its folder's name follows from all that decides its trials."""
    ranges = section.ranges(combination.case)
    axes = _axes(ranges, case=combination.case)

    def trial(number: int, values: dict[str, str], *, within: Path) -> Point:
        first = builder.make(number, combination, _typed(values))
        point = with_number(builder.repeat(first, number, repeat=LATER_SEED), number, folder=within)
        return replace(point, values=combination.values | held_values(point.config, values))

    base = trial(0, {}, within=folder)
    probes = [base]
    for axis in axes:
        for value in axis.probes:
            try:
                probes.append(trial(len(probes), {axis.key: value}, within=folder))
            except (ConfigError, LaunchOptionError) as error:
                where = f"search: {combination.case}: {axis.key}={ranges[axis.key]}: at {value}, "
                raise ConfigError(*(f"{where}{line}" for line in error.args)) from error
    decides: dict[str, Any] = {"space": ranges, "rounds": section.rounds, "metric": section.metric}
    if section.rounds > 1:  # more trials of one round leave the first ones as they are
        decides["trials"] = section.trials
    shared = replace(plan, name=f"{plan.name}-search", options={}, cases={}, grid={}, scale=None, study=decides)
    key = dump_plan(replace(shared, timeout_minutes=None)) + identity(
        values_of(base.config), base.ranks, base.ranks_per_node
    )
    place = SweepFolder(folder / "searches" / sha256(key.encode()).hexdigest()[:12])
    rounds = Rounds(
        plan=shared,
        axes=axes,
        trials=section.trials,
        rounds=section.rounds,
        metric=section.metric,
        seed=base.seed - LATER_SEED,
        make=lambda number, values: trial(number, values, within=place.path),
        parallel=parallel,
    )
    return CaseSearch(combination.values, ranges, place, base.config.run.epochs, rounds, tuple(probes), None)


def _typed(values: Mapping[str, str]) -> dict[str, Any]:
    return parse_overrides([f"--{key}={text}" for key, text in values.items()], prog="bigbatch sweep")


def tuned_values(searches: Sequence[CaseSearch]) -> dict[int, Mapping[str, Any] | None]:
    """Return the best values by the index of the combination; None if there are none yet."""
    return {index: each.best for index, each in enumerate(searches)}


def run_searches(searches: Sequence[CaseSearch], values: Sequence[dict[str, Any]], folder: Path) -> list[CaseSearch]:
    """Run the searches of points with these values that have not ended, and note each result in the sweep's folder.

    Raises: Interrupted; TuneError; RunFolderError.
    """
    ended = list(searches)
    for index, each in enumerate(searches):
        if each.result is None and each.values in values:
            import_optuna()
            print_line(f"search {index + 1} of {len(searches)}, in {each.folder.path}")
            ended[index] = replace(each, result=each.run())
        write_searches(folder, [each.result for each in ended if each.result is not None])
    return ended


def describe_searches(searches: Sequence[CaseSearch], points: Sequence[Point]) -> Iterator[str]:
    """Yield a line on the budget, and one for each search."""
    epochs = sum(each.rounds.trials * each.epochs for each in searches)
    trained = sum(point.config.run.epochs for point in points)
    trials = sum(each.rounds.trials for each in searches)
    line = f"searches of {count(len(searches), 'case')}, {count(trials, 'trial')}: {epochs} epochs; then "
    yield line + f"{count(len(points), 'point')}: {trained} epochs; in all {epochs + trained} epochs"
    for each in searches:
        name = ", ".join(map(str, each.values.values())) or "all points"
        space, trial = "; ".join(map(str, each.rounds.axes)), count(each.epochs, "epoch")
        yield f"search of {name}: {space}, {trial} a trial: {each.result.describe() if each.result else 'to run'}"
