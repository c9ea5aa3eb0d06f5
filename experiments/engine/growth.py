"""A sweep that grows: which points its folder keeps, and which are new, changed or gone. Reads the folder only.

A point is known by its settings, not by its number: an inserted value renames and repeats no other point.
"""

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count as counting
from pathlib import Path
from typing import Any

from bigbatch.errors import LaunchOptionError
from bigbatch.experiments.engine.folder import (
    MAY_CHANGE,
    PENDING,
    SUBMITTED,
    SweepFolder,
    read_experiment_file,
    require_same_experiment,
    values_of,
)
from bigbatch.experiments.engine.plan import SweepPlan, describe_values
from bigbatch.experiments.engine.points import Point, with_number
from bigbatch.trainer.config.strict_yaml import as_yaml
from bigbatch.words import count

KEPT, NEW, CHANGED, GONE = "kept", "new", "changed", "gone"
"""What becomes of a point; one that has not started yet is PENDING."""
GROWING = ("cases", "grid", "seeds", "search")
"""Keys of a plan that may change all points. A change of another key that keeps no point is a mistake."""
MODE, THREADS = "compute.mode", "compute.cpu_threads"
MODES = (MODE, "compute.mode_keeps")
BESIDE = ("run.directory", THREADS, *MODES)
"""Keys that do not identify a point, or do so by a rule of their own: is_kept_by()."""


@dataclass(frozen=True)
class Growth:
    """The points of a plan, with the numbers of their folders, and what happened to them since the last command."""

    points: tuple[Point, ...]
    """In the order of the plan."""
    status: dict[int, str] = field(default_factory=dict)
    """KEPT, NEW, PENDING, or CHANGED and which point it replaces, by number; empty for a new folder."""
    leaving: dict[int, str] = field(default_factory=dict)
    """Points that were part of the sweep until now, and that none replaces: their values, by number."""
    gone: tuple[int, ...] = ()
    """All points of the folder that are no part of the sweep."""
    lines: tuple[str, ...] = ()
    """What changed, in the terms of the sweep's file."""
    notes: tuple[str, ...] = ()

    @property
    def has_changed(self) -> bool:
        return bool(self.lines or self.leaving or any(status not in (KEPT, PENDING) for status in self.status.values()))

    def describe(self) -> Iterator[str]:
        """Yield a line for each changed key, one with the numbers of points, and notes."""
        yield from self.lines
        if self.has_changed:
            found = [status.partition(",")[0] for status in self.status.values()]
            numbers = ", ".join(f"{found.count(status)} {status}" for status in (KEPT, PENDING, NEW, CHANGED))
            yield f"the sweep has changed; its points: {numbers}, {len(self.leaving)} {GONE}"
        if self.gone:
            yield f"not in the report: {count(len(self.gone), 'earlier point')} of this folder; --prune removes them"
        yield from self.notes


@dataclass(frozen=True)
class _Old:
    """A point of the folder."""

    number: int
    state: dict[str, Any]
    config: dict[str, Any] | None
    """None if it has not started."""

    @property
    def label(self) -> str:
        return _label(self.state["values"], self.state.get("seed"))

    @property
    def identity(self) -> str | None:
        ranks = (self.state.get("ranks"), self.state.get("ranks_per_node"))
        return None if self.config is None else identity(self.config, *ranks)

    def is_kept_by(self, new: Mapping[str, Any], machine_keys: Sequence[str]) -> bool:
        """Tell if a point of equal identity is this one: what the machine chose may differ, what is stated may not."""
        known, old = self.state.get("machine_keys", machine_keys), self.config or {}
        for key in (THREADS, *MODES):
            chosen = (None, "auto") if key == MODE else (None,)
            free = [
                value in chosen or (key in of_machine and value != "eager")
                for value, of_machine in ((old.get(key), known), (new[key], machine_keys))
            ]
            if not (old.get(key) == new[key] or (key != "compute.mode_keeps" and all(free))):
                return False
        return True


def grow(plan: SweepPlan, made: Sequence[Point], folder: SweepFolder) -> Growth:
    """Compare the points of a plan with those of its folder, and number them. Writes nothing.

    Raises: LaunchOptionError if the folder holds another sweep, or is damaged.
    """
    before = folder.require_same(plan)
    if before is None or not folder.numbers():  # a sweep that tunes its cases has no points before
        return Growth(tuple(made))
    olds = {number: _read(folder, number) for number in folder.numbers()}
    configs = [values_of(point.config) for point in made]
    matches = _match(olds, made, configs)
    left = {number: old for number, old in olds.items() if number not in matches.values()}
    replaced = {old.label: number for number, old in left.items()}
    unused = (number for number in counting() if number not in olds and not folder.point(number).exists())
    points, status, lines = [], dict[int, str](), list(_plan_changes(before, plan))
    others: dict[str, list[Any]] = {}
    for index, (point, config) in enumerate(zip(made, configs, strict=True)):
        number = matches[index] if index in matches else next(unused)
        points.append(with_number(point, number, folder=folder.path))
        status[number] = NEW if number not in olds else KEPT if olds[number].config else PENDING
        if index not in matches and (was := replaced.get(_label(point.values, point.seed))) is not None:
            status[number] = f"{CHANGED}, was point {was}"
            for key, text in () if point.awaits_search else _config_changes(olds[was].config or {}, config):
                others.setdefault(key, [f"{text} (point {was}: {point.describe()}", 0])[1] += 1
    _require_some_kept(folder, plan, before, olds, matches, points, status)
    named = [line.partition(": ")[0] for line in lines]
    for key, (text, number) in others.items():
        if not any(name.endswith(f".{key}") for name in named):
            lines.append(f"{text}{f' and {number - 1} more' if number > 1 else ''})")
    members = [number for number, old in left.items() if old.state.get("index", number) is not None]
    leaving = {
        number: describe_values(left[number].state["values"])
        for number in members
        if f"{CHANGED}, was point {number}" not in status.values()
    }
    queued = [n for n in members if left[n].state["state"] == SUBMITTED]
    notes = [f"point {n} is gone, but in Slurm's queue: scancel {left[n].state['job']}_{n}" for n in queued]
    notes += _mode_notes(olds, matches, made)
    return Growth(tuple(points), status, leaving, tuple(sorted(left)), tuple(lines), tuple(notes))


def _read(folder: SweepFolder, number: int) -> _Old:
    state = folder.read_state(number)
    if not (path := folder.config(number)).exists():
        return _Old(number, state, None)
    config = read_experiment_file(path)
    here = folder.run(number).path
    if (stated := str(config.get("run.directory"))) and here.absolute() != Path(stated).absolute():
        raise LaunchOptionError(
            f"{path} has run.directory={json.dumps(stated)} instead of {json.dumps(str(here))}: start the command in "
            "the same folder as before, or name another --folder"
        )
    return _Old(number, state, config)


def _label(values: Mapping[str, Any], seed: Any) -> str:
    return json.dumps([values, seed], sort_keys=True, default=str)


def identity(config: Mapping[str, Any], ranks: Any, ranks_per_node: Any) -> str:
    """Return what a point trains, and on how many ranks."""
    stated = {key: value for key, value in config.items() if key not in BESIDE}
    return json.dumps([stated, ranks, ranks_per_node], sort_keys=True, default=str)


def _match(olds: Mapping[int, _Old], made: Sequence[Point], configs: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Return the number of the folder's point for each index in made that has one.

    First those of equal settings, of these first the ones with equal values and seed; then those that never started.
    """
    by_label: dict[str, list[int]] = {}
    by_identity: dict[str | None, list[int]] = {}
    for number, old in olds.items():
        by_label.setdefault(old.label, []).append(number)
        by_identity.setdefault(old.identity, []).append(number)
    matches: dict[int, int] = {}
    taken: set[int] = set()
    labels = [_label(point.values, point.seed) for point in made]
    identities = [identity(c, p.ranks, p.ranks_per_node) for p, c in zip(made, configs, strict=True)]
    for is_same_label, starts in ((True, True), (False, True), (True, False)):
        for index, point in enumerate(made):
            if index in matches:
                continue
            alike = by_identity.get(identities[index], []) if starts else by_label.get(labels[index], [])
            for number in alike:
                old = olds[number]
                if number in taken or (is_same_label and old.label != labels[index]):
                    continue
                if old.is_kept_by(configs[index], point.machine_keys) if starts else old.config is None:
                    matches[index] = number
                    taken.add(number)
                    break
    return matches


def _plan_changes(before: SweepPlan, plan: SweepPlan) -> Iterator[str]:
    """Yield a line for each key of the plan that changed: cases.Muon.schedule.base_lr: 0.05, was 0.1."""
    for name in dict.fromkeys((*before.cases, *plan.cases)):
        if (name in plan.cases) != (name in before.cases):
            yield f"cases.{name}: {NEW if name in plan.cases else GONE}"
    both = plan.cases.keys() & before.cases.keys()
    old, new = (
        dict(_leaves({**dataclasses.asdict(each), "cases": {name: each.cases[name] for name in both}}))
        for each in (before, plan)
    )
    for key in dict.fromkeys((*new, *old)):
        was, now = (as_yaml(each[key]) if key in each else "not stated" for each in (old, new))
        if was != now:
            yield f"{key}: {now}, was {was}"


def _leaves(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _config_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key in dict.fromkeys((*old, *new)):
        if key not in BESIDE and old.get(key) != new.get(key):
            yield key, f"{key}: {as_yaml(new.get(key))}, was {as_yaml(old.get(key))}"


def _require_some_kept(
    folder: SweepFolder,
    plan: SweepPlan,
    before: SweepPlan,
    olds: Mapping[int, _Old],
    matches: Mapping[int, int],
    points: Sequence[Point],
    status: Mapping[int, str],
) -> None:
    """Raise LaunchOptionError if no point that has started is kept, and not because the file's cases or grid changed.

    An option that was forgotten would otherwise repeat the whole sweep.
    """
    started = {number for number, old in olds.items() if old.config is not None}
    if not started or started & set(matches.values()):
        return
    differing = {line.partition(": ")[0].partition(".")[0] for line in _plan_changes(before, plan)}
    for key in sorted(differing - {*GROWING, *MAY_CHANGE}):
        folder.refuse(key, getattr(before, key), getattr(plan, key))
    for point in points if not differing else ():
        if status[point.number].startswith(CHANGED):
            was = int(status[point.number].rpartition(" ")[2])
            same = with_number(point, was, folder=folder.path)
            require_same_experiment(folder.config(was), same.config, config=plan.config)


def _mode_notes(olds: Mapping[int, _Old], matches: Mapping[int, int], made: Sequence[Point]) -> list[str]:
    """Say that kept points have another compute mode than the sweep would now state for them, if others are to run."""
    pinned = {index: point.config.compute.mode for index, point in enumerate(made) if MODE in point.machine_keys}
    started = {index: config for index, number in matches.items() if (config := olds[number].config)}
    kept = [index for index in pinned if index in started and started[index].get(MODE) not in (None, pinned[index])]
    if not kept or len(started) == len(made):
        return []
    numbers = ", ".join(str(matches[index]) for index in kept)
    was, now = (
        ", ".join(dict.fromkeys(map(str, each)))
        for each in ([started[index][MODE] for index in kept], [pinned[index] for index in kept])
    )
    return [
        f"{MODE}: {was} in the kept points {numbers}, which the other points would have as {now}: a report states no "
        "efficiency between two modes; to train all in one, name another --folder"
    ]
