"""Read and check a sweep's file: an experiment, the cases and values to compare, and where they run."""

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from bigbatch.errors import ConfigError, Refusals
from bigbatch.files import TEXT_BYTES, read_plain
from bigbatch.launch.jobs.spec import JOB_OPTIONS, OPTIONS
from bigbatch.launch.jobs.validation import NAME
from bigbatch.launch.launchers.registry import load_launcher
from bigbatch.tools.emulate.launchers import RUN_OPTIONS
from bigbatch.trainer.config.fields import conform, describe
from bigbatch.trainer.config.file import PACKAGED
from bigbatch.trainer.config.kinds import is_option
from bigbatch.trainer.config.schema import KEYS, require_known, typed
from bigbatch.trainer.config.strict_yaml import as_yaml, dump_yaml, parse_yaml

Place = Literal["local", "mpirun", "torchrun", "emulated", "slurm"]
SCALINGS = ("weak", "strong")
RANKS, SCALING, CASE = "ranks", "scaling", "case"
"""Words of a grid that are not config keys, and the column that names a point's case."""
BATCH, RATE = "batch.global_batch_size", "schedule.base_lr"
SET_BY_SWEEP = ("ranks", "nodes", "ranks_per_node", "node_rank", "master", "array", "logs", "name", "stop_seconds")
"""Options of bigbatch launch that a sweep sets itself."""
MAX_POINTS = 10_000
"""Most points of a sweep: more would take hours to check and list."""
SIZES = ("batch.microbatch_size", BATCH, "batch.bn_span")


@dataclass(frozen=True, kw_only=True)
class SweepPlan:
    """A sweep; each field is a key of its file, and only config is required."""

    name: str
    """Name of its folder, runs/sweeps/NAME; by default the file's."""
    config: str
    """The experiment: a file, or the name of a packaged one."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keys of the experiment that have other values in all points."""
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Keys that change together: named cases, or a list; ranks may be one of the keys."""
    cumulative: bool = False
    """True if each case includes the changes of those before it."""
    grid: dict[str, Any] = field(default_factory=dict)
    """Values to try, in all combinations with each other and the cases: ranks, scaling, any key of the experiment."""
    scale: Literal["linear", "sqrt"] | None = None
    """Rule of the rate for a batch B: times B / first, or its square root; first: the grid's, else the experiment's."""
    seeds: int = 1
    """Runs of each combination, from the experiment's seed on."""
    epochs: int | None = None
    """Epochs of each point, with its schedule in proportion; null: as each point states."""
    steps: int | None = None
    """Steps of each point on generated tensors, to measure speed; null: train."""
    target_top1: float | None = None
    """Top-1 to reach: evaluates each epoch, and reports how long the training took."""
    where: Place = "local"
    launch: dict[str, Any] = field(default_factory=dict)
    """Options of bigbatch launch, such as partition; for emulated nodes also link and delay."""
    ranks: int = 1
    """Ranks of a point, unless cases or grid state them."""
    ranks_per_node: int | None = None
    """Ranks on each node; fewer ranks take one node; null: all on one."""
    timeout_minutes: float | None = None
    """A point that takes longer is ended and fails; under Slurm the job's limit, if launch states no time."""
    script: tuple[str, ...] | None = None
    """Runs instead of `bigbatch train`: a Python script, or -m and a module, with arguments; --config FILE follows."""
    inference: dict[str, Any] = field(default_factory=dict)
    """Forms of inference to measure with the last case's runs: name -> words that it adds to `bigbatch evaluate`."""

    search: dict[str, Any] = field(default_factory=dict)
    """Keys to tune inside each case, before the points run with the best values: experiments/search/cases.py."""

    study: dict[str, Any] = field(default_factory=dict)
    """Settings of a search in its folder, such as of bigbatch tune search; a sweep has none."""

    @property
    def folder(self) -> Path:
        """Return the folder of its points, unless --folder names another one."""
        return Path("runs/sweeps") / self.name

    @property
    def has_other_hosts(self) -> bool:
        """Return whether points may run on other hosts than this one."""
        return self.where == "slurm" or not {"hosts", "hostfile"}.isdisjoint(self.launch)

    def changes(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each case's name and all its changes; one unnamed case without changes if the file states none."""
        before: dict[str, Any] = {}
        for name, own in (self.cases or {"": {}}).items():
            before = overridden(before, own) if self.cumulative else own
            yield name, before


def packaged_sweeps() -> list[str]:
    return sorted(path.stem for path in (PACKAGED / "sweeps").glob("*.yaml"))


def launch_options(where: str) -> tuple[str, ...]:
    """Return the names of the launch options that a sweep's file may state for that place."""
    if where == "emulated":
        return tuple(each.name for each in RUN_OPTIONS)
    refused = {OPTIONS[field].name for field in load_launcher(where).refused}
    return tuple(each.name for each in JOB_OPTIONS if each.name not in {*SET_BY_SWEEP, *refused})


def read_plan(path: Path, *, replaced: Mapping[str, Any] | None = None) -> SweepPlan:
    """Read a YAML file; replaced: keys that replace the file's, and options to add.

    Raises: ConfigError, a line that names the file for each mistake.
    """
    content = _read(path)
    options, own = content.get("options") or {}, dict(replaced or {})
    if isinstance(options, dict):
        own["options"] = overridden(options, own.get("options", {}))
    plan, wrong = _conform({"name": path.stem} | content | own)
    wrong += _mistakes(plan)
    if wrong:
        raise ConfigError(*(f"{path}: {line}" for line in dict.fromkeys(wrong)))
    return plan


def known_plan(content: dict[str, Any]) -> SweepPlan:
    """Return the plan of a sweep's folder, perhaps of another release: keys that do not fit have their defaults."""
    return _conform(content)[0]


def overridden(*layers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the last layer that states a key; a whole mapping replaces its parts in earlier layers."""
    stated: dict[str, Any] = {}
    for layer in layers:
        whole = tuple(f"{key}." for key in layer)
        stated = {key: value for key, value in stated.items() if not key.startswith(whole)} | dict(layer)
    return stated


def dump_plan(plan: SweepPlan) -> str:
    """Return the plan as the YAML of a sweep's file."""
    return dump_yaml(dataclasses.asdict(plan))


def describe_values(values: Mapping[str, Any]) -> str:
    """Return KEY=VALUE of each, separated by commas."""
    return ", ".join(f"{key}={as_yaml(value)}" for key, value in values.items())


def _read(path: Path) -> dict[str, Any]:
    try:
        content: Any = parse_yaml(read_plain(path, most=TEXT_BYTES))
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise ConfigError(f"{path} is not readable YAML: {words}; see {PACKAGED / 'sweeps/scaling.yaml'}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: it holds no keys; see {PACKAGED / 'sweeps/scaling.yaml'}")
    return content


def _conform(content: dict[str, Any]) -> tuple[SweepPlan, list[str]]:
    if isinstance(content.get("cases"), list):
        content["cases"] = _with_names(content["cases"])
    if isinstance(content.get("cases"), dict):  # a case without changes has no value
        content["cases"] = {str(name): {} if own is None else own for name, own in content["cases"].items()}
    held, wrong = conform_all(content, SweepPlan, where="")
    cases = [isinstance(own, dict) and RANKS in own for own in held.get("cases", {}).values()]
    others = {"grid": RANKS in held.get("grid", {}), "all cases": cases and all(cases)}
    if RANKS in content and "study" not in content:  # the file in a sweep's folder states every key
        wrong += [f"ranks: {content[RANKS]} and the ranks of {name}: keep one" for name, has in others.items() if has]
    if "config" not in content:
        wrong.append("config is missing: name the experiment, a file or a packaged one")
    return SweepPlan(**{"name": "sweep", "config": ""} | held), wrong


def conform_all(content: Mapping[str, Any], holder: type, *, where: str) -> tuple[dict[str, Any], list[str]]:
    """Return the values of a dataclass's fields that fit, and a line for each key that does not."""
    kinds, wrong, held = get_type_hints(holder), list[str](), {}
    for name, value in content.items():
        if name not in kinds:
            wrong.append(_unknown(str(name), tuple(kinds), where=where or "top level"))
            continue
        try:
            held[name] = conform(value, kinds[name])
        except TypeError:
            wrong.append(f"{where and f'{where}: '}{name}: {value!r} must be {describe(kinds[name])}")
    return held, wrong


def _with_names(cases: list[Any]) -> Any:
    """Name each case of a list by the keys in which the cases differ."""
    if not all(isinstance(case, dict) for case in cases):
        return cases  # its type check refuses it
    shared = set()
    if len(cases) > 1:
        shared = {key for key in cases[0] if all(key in case and case[key] == cases[0][key] for case in cases)}
    names = [describe_values({k: v for k, v in case.items() if k not in shared}) or "as it is" for case in cases]
    return dict(zip(names, cases, strict=True)) if len(set(names)) == len(names) else cases


def _unknown(name: str, known: tuple[str, ...], *, where: str) -> str:
    refusals = Refusals()
    try:
        with refusals.raise_all():
            require_known(name, known=known, where=where, refusals=refusals, listing="bigbatch sweep --help")
    except ConfigError as error:
        return str(error)
    raise AssertionError(f"{name} is known")


def _mistakes(plan: SweepPlan) -> Iterator[str]:
    if not re.fullmatch(NAME, plan.name, re.ASCII):
        yield f"name {plan.name!r} must be letters, digits and . _ + @ -, such as scaling"
    for key in ("ranks", "ranks_per_node", "seeds", "steps", "epochs"):
        value = getattr(plan, key)
        if value is not None and value < 1:
            yield f"{key}: {value} must be a number from 1 on"
    if plan.timeout_minutes is not None and not 0 < plan.timeout_minutes < 1e6:
        yield f"timeout_minutes: {plan.timeout_minutes:g} must be above 0, and below a million"
    if plan.target_top1 is not None and not 0 < plan.target_top1 <= 1:
        yield f"target_top1: {plan.target_top1:g} must be above 0 and at most 1, such as 0.94"
    if plan.steps is not None and (other := next((key for key in ("epochs", "target_top1") if getattr(plan, key)), "")):
        yield f"steps: {plan.steps} measures speed on generated tensors, so {other} has no effect: remove one"
    if plan.script == ():
        yield "script: [] names no script: give a script, or -m and a module, or leave the key out"
    num_points = math.prod(len(values) for values in plan.grid.values() if isinstance(values, list))
    num_points *= max(1, len(plan.cases)) * plan.seeds
    if num_points > MAX_POINTS:
        yield f"{num_points:,} points (combinations times seeds) are more than {MAX_POINTS:,}: state fewer values"
    if plan.study:
        yield "study: this is the folder of a search: continue it by bigbatch tune search, or by its sweep"
    barred = {"steps": plan.steps is not None, "where: slurm": plan.where == "slurm"}
    for key in (key for key, is_stated in barred.items() if plan.search and is_stated):
        yield f"{key} and search: the search trains one trial after another on this host: remove one of the two"
    if plan.inference and plan.where == "slurm":
        yield "where: slurm and inference: this host would evaluate the runs: remove one of the two"
    yield from _check_launch(plan)
    for name, words in plan.inference.items():
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            yield f"inference: {name}: {words!r} must be a list of words of bigbatch evaluate"
    yield from _check_grid(plan)
    for where, given in {
        "options": plan.options,
        **{f"cases: {name}": own for name, own in plan.cases.items()},
    }.items():
        if not isinstance(given, dict):
            yield f"{where}: {given!r} must be keys with values, or nothing"
            continue
        for key, value in given.items():
            special = (RANKS,) if where != "options" else ()
            yield from _check_value(plan, str(key), value, where=where, special=special)
    if isinstance(plan.cases, dict) and (odd := [name for name in plan.cases if not name.strip()]):
        yield f"cases: {odd[0]!r} is not a name"


def _check_launch(plan: SweepPlan) -> Iterator[str]:
    legal = launch_options(plan.where)
    for name, value in plan.launch.items():
        each = value if isinstance(value, list) else [value]
        if name not in legal:
            yield _unknown(str(name), legal, where=f"launch, of {plan.where}")
        elif value is False or not all(isinstance(one, str | int | float) for one in each):
            yield f"launch, {name}: {value!r} must be text, a number, true or a list of text"


def _check_grid(plan: SweepPlan) -> Iterator[str]:
    stated = {key for own in plan.cases.values() if isinstance(own, dict) for key in own}
    for key, values in plan.grid.items():
        if not isinstance(values, list) or not values:
            yield f"grid: {key}: {values!r} must be a list of values"
            continue
        if any(values.count(value) > 1 for value in values):
            yield f"grid: {key} states a value twice"
        for other, keys in (("options", plan.options), ("cases", stated)):
            if key in keys:
                yield f"{key} is in both {other} and grid: keep one"
        yield from (f"grid: {key} and {part}: keep one" for part in plan.grid if str(part).startswith(f"{key}."))
        for value in values:
            yield from _check_value(plan, str(key), value, where="grid", special=(RANKS, SCALING))
    for name, key, has in (("epochs", "run.epochs", plan.epochs), ("seeds", "run.seed", plan.seeds > 1)):
        if has and key in plan.grid:  # each point would have another value than the one that names it
            yield f"{name}: {getattr(plan, name)} and the {key} of grid: keep one"
    if "weak" in (plan.grid.get(SCALING) or []) and BATCH in {*plan.grid, *stated}:
        yield f"grid: {BATCH} follows from the ranks in weak scaling: leave one of them out"


def _check_value(plan: SweepPlan, key: str, value: Any, *, where: str, special: tuple[str, ...]) -> Iterator[str]:
    ours = {"run.directory": "the sweep", "run.resume": "the sweep"}
    if plan.steps is not None:
        ours |= dict.fromkeys(("run.epochs", "data.num_synthetic_samples"), "steps")
    if plan.target_top1 is not None:
        ours |= dict.fromkeys(("run.eval_every_epochs", "run.eval_offset_epochs"), "target_top1")
    if key in special and key == RANKS:
        if type(value) is not int or value < 1:
            yield f"{where}: ranks {value!r} must be numbers from 1 on, such as [1, 2, 4]"
    elif key in special:
        if value not in SCALINGS:
            yield f"{where}: scaling {value!r} must be one of {', '.join(SCALINGS)}"
    elif key not in KEYS and not is_option(key):
        yield _unknown(key, (*special, *KEYS), where=where)
    elif key in ours:
        yield f"{where}: remove {key}; {ours[key]} sets it"
    elif key in SIZES and (type(value) is not int or value < 1):
        yield f"{where}: {key}={as_yaml(value)} must be a whole number from 1 on"
    else:
        try:
            typed(key, value)
        except ConfigError as error:
            yield f"{where}: {error}"


PLACES: tuple[str, ...] = get_args(Place)
