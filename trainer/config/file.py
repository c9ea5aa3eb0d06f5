"""Read YAML files with their bases and command-line overrides into a checked Config, and write it back."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bigbatch.errors import ConfigError, Refusals, nearest
from bigbatch.files import TEXT_BYTES, read_plain
from bigbatch.parts import load
from bigbatch.paths import PathError, expand_path
from bigbatch.trainer.config.fields import describe, takes_text
from bigbatch.trainer.config.kinds import flat_options, is_option, nest_options
from bigbatch.trainer.config.options import parse_options
from bigbatch.trainer.config.schedule import shorter_schedule
from bigbatch.trainer.config.schema import (
    KEYS,
    SECTIONS,
    Config,
    is_idle,
    key_of,
    make_config,
    overlay,
    require_known,
    typed,
    with_defaults,
)
from bigbatch.trainer.config.sections import MODE_KEYS, RANGE_TEST
from bigbatch.trainer.config.strict_yaml import dump_yaml, parse_yaml
from bigbatch.trainer.config.trust import RUN_CONFIG, TRUST, is_of_run, require_trusted

PACKAGED = Path(__file__).resolve().parents[2] / "configs"
"""Folder of the packaged experiments, in a checkout and in a wheel."""
KEEPS = "compute.mode_keeps"
IN_ITS_FOLDER = "bigbatch.trainer.config.moved.in_its_folder"
BASES = "bases"
"""Folder of packaged YAML that experiments extend; not experiments themselves."""


@dataclass(frozen=True)
class Resolved:
    """An experiment, and the origin of each of its values."""

    config: Config
    origins: dict[str, str]
    """Key -> default, base FILE, recipe FILE or command line."""
    of_runs: dict[str, Path]
    """Key -> file of a run folder that states it; the user may not have written that file."""


def packaged_configs() -> list[str]:
    """List the packaged experiments, such as quickstart and imagenet/resnet50_8k."""
    return [name for name in _packaged() if name.split("/")[0] != BASES]


def find_config(name: str, *, below: Path = Path(), what: str = "--config") -> Path:
    """Return the file of that path, else the packaged experiment or base of that name, else a run folder's config.

    what: the word for the name in an error. Raises: ConfigError naming the nearest.
    """
    try:
        name = expand_path(name)
    except PathError as error:
        raise ConfigError(f"{what} {error}") from None
    if (below / name).is_file():
        return below / name
    if name in (known := _packaged()):
        return PACKAGED / f"{name}.yaml"
    run_config = below / name / RUN_CONFIG
    if name and run_config.is_file():  # without a name it would be the config of below
        return run_config
    near = nearest(name, known)
    hint = f"; the nearest packaged one is {near}" if near else "; bigbatch config list names those"
    raise ConfigError(f"{what} '{name}': there is no such file or packaged experiment{hint}")


def load_config(
    argv: Sequence[str],
    *,
    prog: str = "bigbatch train",
    is_run: bool = False,
    imports: Collection[str] | None = None,
) -> Config:
    """Return the checked config of an experiment; imports no code that it names. is_run: its file is a run folder's.

    imports: keys whose code the caller imports, so that it must be trusted if a run folder names it; None: all.
    Raises: ConfigError with a line for each refusal, also for untrusted import paths; SystemExit after --help.
    """
    resolved = resolve(argv, prog=prog, is_run=is_run)
    of_runs = {key: file for key, file in resolved.of_runs.items() if imports is None or key in imports}
    if of_runs and TRUST not in argv:
        require_trusted(resolved.config, of_runs)
    return resolved.config


def resolve(argv: Sequence[str], *, prog: str = "bigbatch train", is_run: bool = False) -> Resolved:
    """Return an experiment to print, with the origins of its values. Raises: as load_config."""
    refusals = Refusals()
    names, overrides = _parse(argv, refusals, prog=prog, takes_config=True)
    with refusals.raise_all():
        if not names:
            raise ConfigError("--config is missing: name a YAML file or one of " + ", ".join(packaged_configs()))
        if len(names) > 1:
            raise ConfigError(f"--config is given {len(names)} times: keep one, and override its keys by --section.key")
        path = find_config(names[0])
        is_run = is_run or path == Path(names[0]) / RUN_CONFIG
        experiment = read_stated(path, refusals, is_run=is_run)
        if path.name == RUN_CONFIG:
            experiment = load(IN_ITS_FOLDER)(experiment, overrides)
        return experiment.with_values(overrides)


def parse_overrides(argv: Sequence[str], *, prog: str) -> dict[str, Any]:
    """Return key -> value of options such as --run.epochs=3. Raises: ConfigError."""
    refusals = Refusals()
    with refusals.raise_all():
        names, overrides = _parse(argv, refusals, prog=prog, takes_config=False)
        if names:
            raise ConfigError(f"--config {names[0]}: the file states the experiment: leave it out")
    return overrides


def _parse(
    argv: Sequence[str], refusals: Refusals, *, prog: str, takes_config: bool
) -> tuple[list[str], dict[str, Any]]:
    names, words = parse_options(argv, prog=prog, takes_config=takes_config, refusals=refusals)
    overrides = {}
    for key, word in words.items():
        with refusals.collect(key):
            overrides[key] = typed(key, _value_of(key, word))
    return names, overrides


@dataclass(frozen=True)
class Experiment:
    """Values that an experiment's file and its bases state: read once, to make any number of configs."""

    path: Path
    stated: Mapping[str, Any]
    origins: Mapping[str, str]
    of_runs: Mapping[str, Path]
    """Key -> file of a run folder, if that file is the last to state the key."""
    own: Collection[str]
    """Keys for which the last file to state them is not a packaged one."""

    def with_values(self, overrides: dict[str, Any]) -> Resolved:
        """Return the config with these values, which have the types of their keys. Raises: ConfigError."""
        stated, origins = dict(self.stated), dict(self.origins)
        if "schedule.base_lr" in overrides:  # replaces the rate that a file takes from a range test
            stated.pop(RANGE_TEST, None)
            origins.pop(RANGE_TEST, None)
        stated = overlay(stated, overrides)
        values = with_defaults(stated)
        values["run.directory"] = values["run.directory"].replace("{name}", self.path.stem)
        # keys that compute.mode=auto must not change: those that the user states, or lists under KEEPS
        kept = overrides[KEEPS] if KEEPS in overrides else {*overrides, *self.stated.get(KEEPS, self.own)}
        values[KEEPS] = tuple(key for key in MODE_KEYS if key in kept)
        try:
            config = make_config(values)
        except ConfigError as error:
            epochs = self.stated.get("run.epochs", KEYS["run.epochs"].default)
            shorter = shorter_schedule(flat_options(values), epochs=epochs, kept=flat_options(nest_options(overrides)))
            raise ConfigError(*error.args, *(shorter if "run.epochs=" in str(error) else ())) from None
        origins |= dict.fromkeys(overrides := nest_options(overrides), "command line")
        of_runs = {key: file for key, file in self.of_runs.items() if key not in overrides}
        if (range_test := config.schedule.range_test) is not None:
            config = _with_suggested_rate(config, values, is_stated="schedule.base_lr" in overrides)
            stated["schedule.base_lr"] = config.schedule.base_lr
            origins["schedule.base_lr"] = f"range test {range_test}"
        return Resolved(config, {key: origins[key] if key in stated else "default" for key in KEYS}, of_runs)


def _with_suggested_rate(config: Config, values: Mapping[str, Any], *, is_stated: bool) -> Config:
    """Return the config with the rate of its range test: the run states that number, so a restart needs no file."""
    from bigbatch.trainer.config.range_test import suggested_rate

    rate = suggested_rate(flat_options(values), read_recipe=read_dumped, is_rate_stated=is_stated)
    return dataclasses.replace(config, schedule=dataclasses.replace(config.schedule, base_lr=rate, range_test=None))


def read_experiment(name: str) -> Experiment:
    """Read a file, a packaged experiment or a run folder's. Raises: ConfigError, also for its import paths."""
    refusals = Refusals()
    with refusals.raise_all():
        path = find_config(name, what="config")
        found = read_stated(path, refusals, is_run=path == Path(name) / RUN_CONFIG)
    resolved = found.with_values({})
    require_trusted(resolved.config, resolved.of_runs)
    return found


def read_stated(path: Path, refusals: Refusals, *, is_run: bool = False) -> Experiment:
    """Return the values that a YAML file and its bases state; the file overrides its bases.

    is_run: path is a run folder's file, even if is_of_run denies it; its bases then count as the run's as well.
    Raises: ConfigError for a file that cannot be read; refusals collects the errors in its keys and values.
    """
    chain: list[tuple[Path, dict[str, Any], bool]] = []
    following = path
    while True:
        # samefile, as one file may go by several paths
        if any(following.samefile(seen) for seen, _, _ in chain):
            raise ConfigError(f"{chain[-1][0]}: base leads back to {following}: remove one base from this circle")
        content = _read(following, named_by=chain[-1][0] if chain else None)
        base = content.pop("base", None)
        is_run = is_run or is_of_run(following)
        chain.append((following, content, is_run))
        if base is None:
            break
        below = following.parent
        following = find_config(str(base), below=below, what=f"{following}: base")
        is_run = is_run or following == below / str(base) / RUN_CONFIG
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    of_runs: dict[str, Path] = {}
    own: set[str] = set()
    # the furthest base first, so that each file overrides what it extends
    for each, content, is_each_run in reversed(chain):
        stated = _flatten_checked(content, path=each, refusals=refusals)
        if is_each_run:  # a run states all keys: one without a meaning must not bind a later choice that gives it one
            whole = with_defaults(stated)
            idle = {name for name, key in KEYS.items() if is_idle(key, whole)}
            stated = {name: value for name, value in stated.items() if name not in idle}
        values = overlay(values, stated)
        is_packaged = each.is_relative_to(PACKAGED)
        short = each.relative_to(PACKAGED) if is_packaged else each
        own = own - stated.keys() if is_packaged else own | stated.keys()
        for key in stated:
            origins[key] = f"{'recipe' if each is path else 'base'} {short}"
            of_runs.pop(key, None)
            if is_each_run:
                of_runs[key] = each
    return Experiment(path, values, origins, of_runs, own)


def read_dumped(text: str) -> dict[str, Any]:
    """Return values by dotted key from the text of dump_config; keys that a later release added have their defaults."""
    stated = nest_options(flatten(parse_yaml(text)))
    values = flat_options(stated | with_defaults(stated))  # with the keys that this version does not know
    return {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}


def dump_config(config: Config) -> str:
    """Return the whole config as YAML text, which load_config takes back."""
    return dump_yaml(dataclasses.asdict(config))


def flatten(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Flatten sections into dotted keys: {'run': {'seed': 0}} -> {'run.seed': 0}."""
    return {f"{section}.{key}": value for section, values in config.items() for key, value in values.items()}


@cache
def _packaged() -> list[str]:
    names = (p.relative_to(PACKAGED).with_suffix("") for p in PACKAGED.rglob("*.yaml"))
    return sorted(str(name) for name in names if name.parts[0] not in ("clusters", "sweeps"))


def _read(path: Path, *, named_by: Path | None) -> dict[str, Any]:
    """Read a recipe. named_by: the file that names it as base: no error then quotes a file of another kind."""
    try:
        content: Any = parse_yaml(read_plain(path, most=TEXT_BYTES))
    except (OSError, ValueError) as error:
        reason = "" if named_by and not isinstance(error, OSError) else f": {error}"
        raise ConfigError(f"{path} is not readable YAML{reason}") from (None if named_by else error)
    if named_by and isinstance(content, dict) and content and not content.keys() & {*SECTIONS, "base"}:
        raise ConfigError(f"{named_by}: base names {path}, which is no recipe: it holds none of {', '.join(SECTIONS)}")
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no sections; see a packaged experiment, {PACKAGED / 'quickstart.yaml'}")
    return content


def _flatten_checked(content: dict[str, Any], *, path: Path, refusals: Refusals) -> dict[str, Any]:
    checked = {}
    for section, values in content.items():
        require_known(str(section), known=(*SECTIONS, "base"), where=str(path), refusals=refusals)
        if not isinstance(values, dict):
            raise ConfigError(f"{path}: section {section} must hold keys and values")
        for key, value in values.items() if section in SECTIONS else ():
            name = f"{section}.{key}"
            if not is_option(name):
                require_known(name, known=tuple(KEYS), where=str(path), refusals=refusals)
            if name in KEYS or is_option(name):
                with refusals.collect(name):
                    checked[name] = typed(name, value)
    return checked


def _value_of(key: str, word: str) -> Any:
    """Return the value of an option's word: YAML, except that text needs no quotes. Raises: ConfigError.

    YAML's other words for null, such as ~ and #x, may name a folder; null itself does not, as in a file.
    """
    known = key_of(key)
    kind = known.kind if known else Any
    is_name = kind is str and word.lower() != "null"
    try:
        value = parse_yaml(word)
    except ValueError as error:
        if takes_text(kind):
            return word
        raise ConfigError(f"{key}={word} must be {describe(kind)}: {error}") from error
    return word if takes_text(kind) and (value is not None or not word or is_name) else value
