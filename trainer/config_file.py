"""YAML files and command-line overrides in, a checked Config out; and back."""

import argparse
import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from bigbatch.trainer.config import Config, all_keys
from bigbatch.trainer.errors import ConfigError

PACKAGED = Path(__file__).resolve().parent.parent / "configs"
"""The experiments that come with bigbatch, in a checkout and in a wheel alike."""


def packaged_configs() -> list[str]:
    """Names of the experiments that come with bigbatch, such as quickstart and imagenet/resnet50_8k."""
    return sorted(str(p.relative_to(PACKAGED).with_suffix("")) for p in PACKAGED.rglob("*.yaml"))


def find_config(name: str) -> Path:
    """A file of that path, or the packaged experiment of that name. Raises: ConfigError naming the nearest."""
    path = Path(name)
    if path.is_file():
        return path
    known = packaged_configs()
    if name in known:
        return PACKAGED / f"{name}.yaml"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"; the nearest packaged one is {near[0]}" if near else ""
    raise ConfigError(f"--config {name}: there is no such file or packaged experiment{hint}")


def make_parser(prog: str) -> ArgumentParser:
    """The command line of an experiment: --config, and one option per key."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=prog,
        exit_on_error=False,
        description="Train one experiment: a complete YAML, and any of its keys as overrides. "
        "Packaged experiments: " + ", ".join(packaged_configs()) + ".",
        epilog=f"example: {prog} --config quickstart --run.epochs 2 --optimizer.momentum 0.8",
        usage=f"{prog} --config NAME_OR_FILE [--section.key VALUE ...]",
    )
    parser.add_argument("--config", action="config", help="YAML file, or name of a packaged experiment.")
    parser.add_class_arguments(Config)
    return parser


def load_config(argv: Sequence[str], *, prog: str = "bigbatch train") -> Config:
    """Parse and check an experiment. Raises: ConfigError, one line; SystemExit after --help."""
    parser = make_parser(prog)
    arguments = _with_config_paths(argv)
    _refuse_unknown_options(arguments)
    try:
        parsed = parser.parse_args(arguments)
        return Config(**{name: parser.instantiate_classes(parsed)[name] for name in _sections()})
    except argparse.ArgumentError as error:
        raise ConfigError(_one_line(str(error))) from error


def dump_config(config: Config) -> str:
    """The whole config as YAML text, which load_config takes back."""
    plain = {
        section: {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
        for section, values in dataclasses.asdict(config).items()
    }
    return yaml.safe_dump(plain, sort_keys=False)


def _sections() -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(Config))


def _with_config_paths(argv: Sequence[str]) -> list[str]:
    """Replace packaged names by paths, and check the keys of each file before anything else."""
    arguments = list(argv)
    for i, argument in enumerate(arguments):
        if argument == "--config" and i + 1 < len(arguments):
            arguments[i + 1] = str(find_config(arguments[i + 1]))
            _check_file(Path(arguments[i + 1]))
        elif argument.startswith("--config="):
            path = find_config(argument.partition("=")[2])
            arguments[i] = f"--config={path}"
            _check_file(path)
    if not any(a.partition("=")[0] in ("--config", "--help", "-h") for a in arguments):
        raise ConfigError("--config is missing: name a YAML file or one of " + ", ".join(packaged_configs()))
    return arguments


def _check_file(path: Path) -> None:
    try:
        content: Any = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not readable YAML: {_one_line(str(error))}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no sections; see a packaged experiment, such as {PACKAGED.name}/quickstart")
    given = []
    for section, values in content.items():
        if not isinstance(values, dict) or section not in _sections():
            _refuse_unknown(str(section), known=_sections(), where=str(path))
            raise ConfigError(f"{path}: section {section} must hold keys and values")
        given += [f"{section}.{key}" for key in values]
    for key in given:
        _refuse_unknown(key, known=all_keys(), where=str(path))
    if absent := [key for key in all_keys() if key not in given]:
        raise ConfigError(f"{path}: {absent[0]} is missing; an experiment states every key")


def _refuse_unknown_options(arguments: Sequence[str]) -> None:
    known = ("config", "help", *all_keys(), *_sections())
    for argument in arguments:
        if argument.startswith("--"):
            _refuse_unknown(argument.partition("=")[0][2:], known=known, where="command line")


def _refuse_unknown(key: str, *, known: Sequence[str], where: str) -> None:
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)
        raise ConfigError(f"{where}: unknown key {key}; the nearest legal one is {near[0]}")


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("typing.", "")
