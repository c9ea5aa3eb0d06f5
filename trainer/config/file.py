"""YAML files and command-line overrides in, a checked Config out; and back."""

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from jsonargparse import ArgumentParser, set_parsing_settings

from bigbatch.errors import ConfigError, nearest
from bigbatch.trainer.config.schema import Config, all_keys

PACKAGED = Path(__file__).resolve().parents[2] / "configs"
"""The experiments that come with bigbatch, in a checkout and in a wheel alike."""


ALIASES = {"--virtual-ranks": "--batch.virtual_ranks"}
"""Short options, and the keys that they state."""


def packaged_configs() -> list[str]:
    """Names of the experiments that come with bigbatch, such as quickstart and imagenet/resnet50_8k."""
    names = (p.relative_to(PACKAGED).with_suffix("") for p in PACKAGED.rglob("*.yaml"))
    return sorted(str(name) for name in names if name.parts[0] not in ("ablations", "sweeps"))


def find_config(name: str) -> Path:
    """A file of that path, or the packaged experiment of that name. Raises: ConfigError naming the nearest."""
    path = Path(name)
    if path.is_file():
        return path
    known = packaged_configs()
    if name in known:
        return PACKAGED / f"{name}.yaml"
    near = nearest(name, known)
    hint = f"; the nearest packaged one is {near}" if near else ""
    raise ConfigError(f"--config '{name}': there is no such file or packaged experiment{hint}")


def make_parser(prog: str) -> ArgumentParser:
    """The command line of an experiment: --config, and one option per key."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=prog,
        exit_on_error=False,
        print_config=None,
        description="Train one experiment: a complete YAML, and any of its keys as overrides. "
        "Packaged experiments: " + ", ".join(packaged_configs()) + ".",
        epilog=f"example: {prog} --config quickstart --run.epochs 2 --optimizer.momentum 0.8. "
        + ", ".join(f"{alias} is short for {option}" for alias, option in ALIASES.items())
        + ".",
        usage=f"{prog} --config NAME_OR_FILE [--section.key VALUE ...]",
    )
    parser.add_argument("--config", action="config", help="YAML file, or name of a packaged experiment.")
    parser.add_class_arguments(Config)
    for action in parser._actions:
        if action.dest in _sections():  # jsonargparse adds --run FILE and so on; we have one way to state a key
            action.help = argparse.SUPPRESS
    return parser


def load_config(argv: Sequence[str], *, prog: str = "bigbatch train") -> Config:
    """Parse and check an experiment. Raises: ConfigError, one line; SystemExit after --help."""
    arguments = _config_first([_without_alias(word) for word in argv])
    _refuse_unknown_options(arguments)
    try:
        parsed = make_parser(prog).parse_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(_explained(_one_line(str(error)))) from error
    return Config(**{name: section(**vars(parsed[name])) for name, section in get_type_hints(Config).items()})


def dump_config(config: Config) -> str:
    """The whole config as YAML text, which load_config takes back."""
    plain = {
        section: {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
        for section, values in dataclasses.asdict(config).items()
    }
    return yaml.safe_dump(plain, sort_keys=False)


def flatten(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """{'run': {'seed': 0}} -> {'run.seed': 0}."""
    return {f"{section}.{key}": value for section, values in config.items() for key, value in values.items()}


def as_yaml(value: object) -> str:
    """One value as a config states it, in one line: null, true, [0, 1]."""
    text = yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize)
    return text.removesuffix("\n").removesuffix("\n...")


def _sections() -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(Config))


def _without_alias(word: str) -> str:
    option, equals, value = word.partition("=")
    return f"{ALIASES.get(option, option)}{equals}{value}"


def _config_first(argv: Sequence[str]) -> list[str]:
    """The words with the checked path of the experiment in front: options override it wherever they stand."""
    names, others = [], []
    words = iter(argv)
    for word in words:
        if word == "--config":
            names.append(next(words, ""))
        elif word.startswith("--config="):
            names.append(word.partition("=")[2])
        else:
            others.append(word)
    if not names and not {"--help", "-h"} & set(others):
        raise ConfigError("--config is missing: name a YAML file or one of " + ", ".join(packaged_configs()))
    if len(names) > 1:
        raise ConfigError(f"--config is given {len(names)} times: keep one, and override its keys by --section.key")
    paths = [find_config(name) for name in names]
    for path in paths:
        _check_file(path)
    return [*(f"--config={path}" for path in paths), *others]


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that is stated twice; YAML itself would let the last one win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        if twice := [key for key in keys if keys.count(key) > 1]:
            raise yaml.MarkedYAMLError(problem=f"{twice[0]} is stated twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _check_file(path: Path) -> None:
    try:
        content: Any = yaml.load(path.read_text(), StrictLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} is not readable YAML: {_one_line(str(error))}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no sections; see a packaged experiment, {PACKAGED / 'quickstart.yaml'}")
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
    known = ("config", "help", *all_keys())
    for argument in arguments:
        if argument.startswith("--"):
            _refuse_unknown(argument.partition("=")[0][2:], known=known, where="command line")


def _refuse_unknown(key: str, *, known: Sequence[str], where: str) -> None:
    if key not in known:
        raise ConfigError(f"{where}: unknown key {key}; the nearest legal one is {nearest(key, known)}")


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("typing.", "")


def _explained(message: str) -> str:
    """jsonargparse's message on a value of the wrong type, with the key's legal type; other messages as they are."""
    if wrong := re.fullmatch(r'Parser key "(\w+\.\w+)": .*(?:Got|Given) value: (.*)', message):
        key, value = wrong.groups()
        return f"{key}={value} must be {_legal_type(key)}"
    if null := re.match(r"the following arguments are required: (\w+\.\w+)", message):
        return f"{null.group(1)}=null must be {_legal_type(null.group(1))}"
    return message


def _legal_type(key: str) -> str:
    section, _, name = key.partition(".")
    legal = inspect.formatannotation(get_type_hints(get_type_hints(Config)[section])[name])
    legal = re.sub(r"Literal\[(.*?)\]", r"one of \1", legal)
    return re.sub(r"Optional\[(.*)\]", r"\1 or null", legal).replace(" | None", " or null")
