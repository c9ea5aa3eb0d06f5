"""What a sweep's file says: a base experiment, where to run it, and the grid of values to try."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bigbatch.errors import LaunchOptionError, or_nearest
from bigbatch.launch.emulate.launchers import RUN_OPTIONS
from bigbatch.launch.jobs.options import JOB_OPTIONS
from bigbatch.launch.jobs.words import NAME, option
from bigbatch.launch.launchers.registry import LAUNCHERS
from bigbatch.trainer.config.file import PACKAGED
from bigbatch.trainer.config.schema import all_keys
from bigbatch.trainer.config.strict_yaml import dump_yaml, parse_yaml

Stated = TypeVar("Stated")
PLACES = ("local", "mpirun", "emulated", "slurm")
SCALINGS = ("weak", "strong")
OURS = ("ranks", "nodes", "ranks_per_node", "node_rank", "master", "array", "logs", "name", "stop_seconds")
"""Options of bigbatch launch that a sweep sets itself."""


@dataclass(frozen=True)
class Sweep:
    """This is a sweep's file; each field is a key of it."""

    name: str
    """Of its folder, runs/sweeps/NAME."""
    config: str
    """The base experiment: a file, or the name of a packaged one."""
    options: dict[str, Any]
    """Keys of the experiment that are other values in all points."""
    steps: int | None
    """Steps of each point, on generated tensors; null: as many as the experiment has."""
    where: str
    """local, mpirun, emulated or slurm."""
    launch: dict[str, Any]
    """Options of bigbatch launch WHERE, such as partition; of emulated, link and delay."""
    ranks_per_node: int
    """Ranks on each node; fewer ranks than these take one node."""
    grid: dict[str, list[Any]]
    """Values to try, in all combinations: ranks, scaling, and any key of the experiment."""
    repeats: int
    """Runs of each combination, with seeds of their own."""
    timeout_minutes: float
    """A point that takes longer is ended and has failed; under Slurm the job's limit, where launch states no time."""
    script: list[str] | None = None
    """Runs instead of `bigbatch train`: a Python script, or -m and a module, with arguments; --config FILE follows."""

    def __post_init__(self) -> None:
        """Check what can be checked without the experiment. Raises: LaunchOptionError."""
        if not re.fullmatch(NAME, self.name, re.ASCII):
            raise LaunchOptionError(f"name {self.name!r} must be letters, digits and . _ + @ -, such as scaling")
        if self.where not in PLACES:
            raise LaunchOptionError(f"where: {self.where!r} must be one of {', '.join(PLACES)}")
        for key in ("ranks_per_node", "repeats", "steps"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise LaunchOptionError(f"{key}: {value} must be a number from 1 on")
        if not 0 < self.timeout_minutes < 1e6:
            raise LaunchOptionError(f"timeout_minutes: {self.timeout_minutes} must be above 0, and below a million")
        check_keys(self.options, legal=all_keys(), where="options")
        check_keys(self.grid, legal=("ranks", "scaling", *all_keys()), where="grid")
        check_keys(self.launch, legal=launch_options(self.where), where=f"launch, of {self.where}")
        if self.script is not None and not self.script:
            raise LaunchOptionError("script: [] names none: give a script, or -m and a module, or leave the key out")
        _check_grid(self.grid)
        _check_launch(self.launch)
        if both := [key for key in self.grid if key in self.options]:
            raise LaunchOptionError(f"{both[0]}: options and grid state it, and a point has one value: leave one out")
        own = {"run.directory", *(("run.epochs", "data.num_synthetic_samples") if self.steps is not None else ())}
        if "weak" in self.grid.get("scaling", []) and "batch.global_batch_size" in self.grid:
            raise LaunchOptionError(
                "grid: batch.global_batch_size follows from the ranks in weak scaling: sweep it apart"
            )
        if taken := [key for key in (*self.options, *self.grid) if key in own]:
            raise LaunchOptionError(f"{taken[0]}: the sweep sets it itself, by its folder and steps: leave it out")

    @property
    def folder(self) -> Path:
        """Return where its points lie, unless --folder names another place."""
        return Path("runs/sweeps") / self.name


def launch_options(where: str) -> tuple[str, ...]:
    """Return what `launch` may state."""
    if where == "emulated":
        return tuple(each.name for each in RUN_OPTIONS)
    refused = {option(field) for field in LAUNCHERS[where].refused}
    return tuple(each.name for each in JOB_OPTIONS if each.name not in OURS and each.flag not in refused)


def read_sweep(path: Path, *, where: str | None = None) -> Sweep:
    """Read a complete YAML file; where replaces its own. Raises: LaunchOptionError, one line that names the file."""
    return read_stated(path, Sweep, replaced={"where": where} if where else {}, example="sweeps/scaling.yaml")


def read_stated(path: Path, kind: type[Stated], *, replaced: dict[str, Any], example: str) -> Stated:
    """Read a dataclass out of a YAML file that states all of its fields, but for those that have a default.

    example is a packaged file that is right. Raises: LaunchOptionError, one line that names the file.
    """
    try:
        content: Any = parse_yaml(path.read_text())
    except (OSError, ValueError) as error:
        words = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise LaunchOptionError(f"{path} is not readable YAML: {words}; see {PACKAGED / example}") from error
    held = dataclasses.fields(kind)  # type: ignore[arg-type]
    fields = {field.name: field.type for field in held}
    needed = [f.name for f in held if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    try:
        if not isinstance(content, dict):
            raise LaunchOptionError(f"it holds no keys; see {PACKAGED / example}")
        check_keys(content, legal=tuple(fields), where="top level")
        if absent := [name for name in needed if name not in content]:
            raise LaunchOptionError(
                f"missing: {', '.join(absent)}; it must state every key, as {PACKAGED / example} does"
            )
        for name, value in content.items():
            _check_type(name, value, fields[name])
        return kind(**(content | replaced))
    except LaunchOptionError as error:
        raise LaunchOptionError(f"{path}: {error}") from error


def dump_sweep(sweep: Sweep) -> str:
    """Write it as YAML, which read_sweep takes back."""
    return dump_yaml(dataclasses.asdict(sweep))


def _check_type(name: str, value: Any, kind: Any) -> None:
    if kind == dict[str, dict[str, Any]]:
        is_right = isinstance(value, dict) and all(isinstance(each, dict) for each in value.values())
        kind_name = "names with keys and values, or {}, each"
    elif kind == dict[str, list[Any]]:
        is_right = isinstance(value, dict) and all(isinstance(each, list) for each in value.values())
        kind_name = "keys with lists of values"
    elif kind == list[str] | None:
        is_right = value is None or (isinstance(value, list) and all(isinstance(each, str) for each in value))
        kind_name = "a list of words, each text"
    elif kind == dict[str, Any]:
        is_right, kind_name = isinstance(value, dict), "keys with values, or {}"
    else:
        legal = {float: int | float, float | None: int | float | None, str: str, int: int}.get(kind, int | None)
        is_right, kind_name = isinstance(value, legal) and not isinstance(value, bool), f"of type {legal}"
        kind_name = kind_name.replace("<class '", "").replace("'>", "")
    if not is_right:
        raise LaunchOptionError(f"{name}: {value!r} must be {kind_name}")


def check_keys(given: dict[str, Any], *, legal: tuple[str, ...], where: str) -> None:
    """Raise LaunchOptionError for a key that is not legal, with the nearest one that is."""
    for key in given:
        if key not in legal:
            near = or_nearest(str(key), legal, words="the nearest legal one is")
            raise LaunchOptionError(f"{where}: unknown key {key}{near or '; legal are ' + ', '.join(legal)}")


def _check_launch(launch: dict[str, Any]) -> None:
    for name, value in launch.items():
        each = value if isinstance(value, list) else [value]
        if value is False or not all(isinstance(one, str | int | float) for one in each):
            raise LaunchOptionError(f"launch, {name}: {value!r} must be text, a number, true or a list of text")


def _check_grid(grid: dict[str, list[Any]]) -> None:
    for key, values in grid.items():
        if not values:
            raise LaunchOptionError(f"grid: {key} has no values")
        if any(values.count(value) > 1 for value in values):
            raise LaunchOptionError(f"grid: {key} states a value twice")
    ranks = grid.get("ranks", [])
    if not ranks or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in ranks):
        raise LaunchOptionError(f"grid: ranks {ranks} must be numbers from 1 on, such as [1, 2, 4]")
    if odd := [mode for mode in grid.get("scaling", []) if mode not in SCALINGS]:
        raise LaunchOptionError(f"grid: scaling {odd[0]!r} must be one of {', '.join(SCALINGS)}")
