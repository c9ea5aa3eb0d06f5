"""Site settings of `bigbatch launch` in bigbatch.toml: partition, account, interface, fabric, container."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from bigbatch.errors import LaunchOptionError, or_nearest, printable
from bigbatch.files import TEXT_BYTES, read_plain
from bigbatch.launch.jobs.fields import Option
from bigbatch.launch.jobs.options import read_options
from bigbatch.launch.jobs.spec import JOB_OPTIONS, OPTIONS
from bigbatch.user_settings import SITE_VARIABLE, site_files

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

KEYS = (
    *("partition", "account", "qos", "reservation", "constraint", "cpus_per_rank", "sbatch", "mpi", "interface"),
    *("image", "container", "mount", "module", "env"),
)
"""Options that a file may state; env is a table of names and values."""

TABLES = {
    "k8s": (
        *("namespace", "queue", "priority", "node_selector", "toleration", "pull_secret", "rdma", "user", "pod"),
        *("image", "mount", "env", "interface", "cpus_per_rank", "memory", "gpus_per_node"),
    )
}
"""Tables with settings for one launcher, which may submit to another cluster than this host's."""

MULTI_HOST_OPTIONS = ("interface",)
"""Options without effect on one host, where the ranks use the loopback interface."""

IMAGE_OPTIONS = ("container", "mount")

MERGED_OPTIONS: dict[str, Callable[[str], str]] = {
    "env": lambda word: re.split("[=@]", word)[0],
    **dict.fromkeys(("sbatch", "pod"), lambda word: word.partition("=")[0]),
}
"""Options whose values are merged by name; value: function that returns a word's name."""

FIELDS = {option.name: field for field, option in OPTIONS.items() if option.help}
"""Option -> field of JobSpec."""


def read_file(path: Path, *, table: str | None = None) -> dict[str, Any]:
    """Return a file's settings by option: words as on the command line, and env as a dict.

    table: one of TABLES; None: settings outside of tables.

    Raises: LaunchOptionError, one line that names the file.
    """
    try:
        content = tomllib.loads(read_plain(path, most=TEXT_BYTES).decode())
    except (OSError, ValueError, RecursionError) as error:
        words = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise LaunchOptionError(f"{path} is not readable TOML: {words}") from error
    read: dict[str | None, dict[str, Any]] = {}
    for name, keys in TABLES.items():
        stated = content.pop(name, {})
        if not isinstance(stated, dict):
            raise LaunchOptionError(f"{path}: {name} = {stated!r} must be a table: [{name}]")
        read[name] = _read_table(path, stated, keys=keys, where=f"[{name}] ")
    read[None] = _read_table(path, content, keys=KEYS, where="")
    return read[table]


def _read_table(path: Path, content: Mapping[str, Any], *, keys: Collection[str], where: str) -> dict[str, Any]:
    for key in content:
        if key not in keys:
            near = or_nearest(key, keys) or f"; legal are {', '.join(keys)}"
            raise LaunchOptionError(f"{path}: {where}unknown key {key}{near}")
    try:
        return {each.name: _read_value(each, content[each.name]) for each in JOB_OPTIONS if each.name in content}
    except LaunchOptionError as error:
        raise LaunchOptionError(f"{path}: {where}{error}") from error


def _read_value(option: Option, value: object) -> Any:
    is_table, is_list = option.name == "env", option.repeats and option.name != "env"
    words = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
    is_right = isinstance(value, dict) == is_table and isinstance(value, list) == is_list
    if not is_right or not all(isinstance(word, str | int) and not isinstance(word, bool) for word in words):
        form = "a table of names and values" if is_table else "a list of words" if is_list else "one word or number"
        raise LaunchOptionError(f"{option.name} = {value!r} must be {form}")
    if isinstance(value, dict):
        return {name: str(word) for name, word in value.items()}
    return getattr(read_options({option.name: value}, [option]), option.name)


def apply_site(arguments: argparse.Namespace, *, refused: Collection[str], table: str | None = None) -> list[str]:
    """Set options that are not stated from the nearest file that has them; return lines with value and source.

    refused: fields of JobSpec that the launcher does not support; files may state them for others. A list is taken as a
    whole; env and sbatch are merged by name. The ranks receive the settings for the run's summary.
    table: use only this table of TABLES.
    Raises: LaunchOptionError, also if a file is invalid from which no value would be used.
    """
    taken: dict[str, dict[str, Any]] = {}
    for path in site_files():
        stated = {name: value for name, value in read_file(path, table=table).items() if FIELDS[name] not in refused}
        if not (arguments.hosts or arguments.hostfile or arguments.nodes):
            stated = {name: value for name, value in stated.items() if name not in MULTI_HOST_OPTIONS}
        if not (table or arguments.image or "image" in stated):
            stated = {name: value for name, value in stated.items() if name not in IMAGE_OPTIONS}
        used = {name: found for name, value in stated.items() if (found := _fill(arguments, name, value))}
        if used:
            taken[str(path)] = used
    if taken:
        arguments.env = [*arguments.env, f"{SITE_VARIABLE}={json.dumps(taken)}"]
    return [f"from {path}: {printable(_as_options(used))}" for path, used in taken.items()]


def _fill(arguments: argparse.Namespace, name: str, value: Any) -> Any:
    """Set an option if the arguments do not state it; return the added values."""
    held = getattr(arguments, name)
    if name not in MERGED_OPTIONS:
        if held is None or held == []:
            setattr(arguments, name, value)
            return value
        return None
    words = [f"{key}={each}" for key, each in value.items()] if name == "env" else value
    name_of = MERGED_OPTIONS[name]
    known = {name_of(word) for word in held}
    new = [word for word in words if name_of(word) not in known]
    setattr(arguments, name, [*new, *held])
    return dict(word.split("=", 1) for word in new) if name == "env" else new


def _as_options(used: Mapping[str, Any]) -> str:
    words = []
    for name, value in used.items():
        each = [f"{key}={one}" for key, one in value.items()] if isinstance(value, dict) else value
        words += [f"--{name.replace('_', '-')} {one}" for one in (each if isinstance(each, list) else [each])]
    return " ".join(words)
