"""A leading ~ and $NAME in a path: expanded alike for all options and keys, or refused by name."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from bigbatch.cli import COMMANDS, GROUP
from bigbatch.errors import ConfigError
from bigbatch.groups import GROUPS, load_command
from bigbatch.launch.jobs.spec import JOB_OPTIONS
from bigbatch.paths import PathError, as_path, expand_path
from bigbatch.trainer.config.fields import takes_text
from bigbatch.trainer.config.schema import KEYS, key_of, typed

MODULES = [module for module, _ in COMMANDS.values() if module != GROUP]
MODULES += [module for group in GROUPS.values() for module, _ in group.commands.values()]
NAMED_AS_PATH = re.compile(
    r"(?i)file|folder|dir|path|csv|config|cluster|weights|checkpoint|plot|html|trace|dumps|archives|root|logs|image|mount"
    r"|\b(json|out|output|run|runs|src|dst|target|sweep|profile)\b"
)
"""What dest or metavar of an option that takes a path matches, and no other without choices and with a plain text."""
OF_NAMES = ("config", "named", "name", "a", "b", "cluster", "predict", "sweep", "what", "logs", "image", "mount")
"""Options that take a name or a path: their own checks refuse an empty one."""


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch/me")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("UNSET", raising=False)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("~", "/home/me"),
        ("~/runs/a", "/home/me/runs/a"),
        ("$SCRATCH/a", "/scratch/me/a"),
        ("${SCRATCH}a:/data", "/scratch/mea:/data"),
        ("$HOME/~/$SCRATCH", "/home/me/~//scratch/me"),
        ("~root/a", "/root/a"),
        # these are paths and names as they are
        ("runs/{name}", "runs/{name}"),
        ("a~", "a~"),
        ("cash$", "cash$"),
        ("-", "-"),
        ("torchvision:resnet50", "torchvision:resnet50"),
        ("hf://me/~data", "hf://me/~data"),
    ],
)
def test_path_is_expanded(text: str, path: str) -> None:
    assert (expand_path(text), as_path(text)) == (path, Path(path))


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("$UNSET/a", "$UNSET"),
        ("runs/${UNSET}/a", "${UNSET}"),
        ("$EMPTY/a", "$EMPTY"),
        ("${UNSET:-/tmp}", "${UNSET"),
        ("$(pwd)/a", "$("),
        ("~no_such_user/a", "~no_such_user"),
    ],
)
def test_path_without_a_value_is_refused_by_name(text: str, name: str) -> None:
    with pytest.raises(PathError) as raised:
        expand_path(text)
    assert str(raised.value) == f"{text}: {name} has no value here: set it, or write the path itself"


@pytest.mark.parametrize("text", ["a\0b", "~a\0b", "a\ud800"])
def test_text_that_no_path_can_hold_is_refused(text: str) -> None:
    """YAML can state such text; a folder of this name cannot be made."""
    with pytest.raises(PathError, match="no path on this system can hold this text"):
        expand_path(text)


def test_file_of_this_name_stays(tmp_path: Path) -> None:
    (tmp_path / "~$a.jpg").touch()
    assert expand_path("~$a.jpg") == "~$a.jpg"


def test_all_keys_of_paths_are_expanded() -> None:
    text_keys = {name for name, key in KEYS.items() if takes_text(key.kind)}
    paths = {name for name in text_keys if KEYS[name].is_path}
    names = {f"{section}.name" for section in ("model", "optimizer", "schedule")}
    assert text_keys - paths == names | {"run.stop_metric", "data.loader", "optimizer.loss", "comm.interface"}
    for name in paths:
        assert typed(name, "~/$SCRATCH") == "/home/me//scratch/me"
        with pytest.raises(ConfigError, match=rf"^{name}=\$UNSET/a: \$UNSET has no value here"):
            typed(name, "$UNSET/a")


class Parsing(Exception):
    """Ends a command when it starts to parse, with its parser."""

    def __init__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        self.parser = parser


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from _actions(each)


def _start_parsing(*arguments: object) -> None:
    raise Parsing(*arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("module", MODULES)
def test_all_options_of_paths_are_expanded(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", _start_parsing)
    with pytest.raises(Parsing) as raised:
        load_command(module).main([])
    for action in _actions(raised.value.parser):
        is_key = key_of(action.dest) is not None
        if action.nargs == 0 or action.choices or is_key or action.type in (expand_path, as_path):
            continue
        words = f"{action.dest} {action.metavar or ''}".replace("_", " ")
        assert action.type not in (Path, int, float), f"{words}: of bigbatch.paths or bigbatch.words"
        assert action.type not in (None, str) or not NAMED_AS_PATH.search(words), words
        assert action.type is not expand_path or action.dest in OF_NAMES, f"{words}: as_path refuses an empty one"


def test_all_options_of_jobs_that_are_paths_are_expanded() -> None:
    paths = {each.name for each in JOB_OPTIONS if each.kind in (expand_path, as_path)}
    assert paths == {"hostfile", "logs", "image", "mount"}
