"""The YAML that bigbatch reads and writes: scalars of YAML 1.2 in decimal, each key once, no tags, anchors, aliases."""

import re
import sys
from contextlib import suppress
from typing import Any

import yaml

from bigbatch.words import DECIMAL, WHOLE

_SCALARS = {
    # tag: (pattern, first characters)
    "null": ("~|null|Null|NULL|", ("~", "n", "N", "")),
    "bool": ("true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (WHOLE, "-+0123456789"),
    "float": (rf"{DECIMAL}|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+.0123456789"),
}
"""Everything else is text as it is written: YAML 1.1, PyYAML's own, reads 010 as 8, 1:30 as 90 and no as false."""
_STANDARD = "tag:yaml.org,2002:"


_OLD = yaml.SafeLoader("")
"""Resolves scalars as YAML 1.1 does."""


class Ambiguous(str):
    """Text without quotes that YAML 1.1 does not read as text, such as no: legal only if the key takes only text."""


class _Loader(yaml.SafeLoader):
    def construct_text(self, node: yaml.ScalarNode) -> str:
        text: str = self.construct_scalar(node)
        is_plain = node.style is None
        return Ambiguous(text) if is_plain and _OLD.resolve(yaml.ScalarNode, text, (True, False)) != node.tag else text

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()
        name = "*" if isinstance(event, yaml.AliasEvent) else "&" if event.anchor else ""
        if name or event.tag is not None:
            met = f"{name}{event.anchor}" if name else event.tag.replace(_STANDARD, "!!")
            problem = f"{met}: tags, anchors and aliases are not read: write the value itself"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is stated twice; YAML itself would take the last value."""
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.MarkedYAMLError(problem=f"{key.value} is stated twice", problem_mark=key.start_mark)
            seen.add(str(key.value))
        found = super().construct_mapping(node, deep)
        if len(found) < len(node.value):
            raise yaml.MarkedYAMLError(problem="two keys have the same value", problem_mark=node.start_mark)
        return found


class _Dumper(yaml.SafeDumper):
    """Quotes text that this loader or one of YAML 1.1 would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        # in other styles a line end would begin a new line
        return self.represent_scalar(f"{_STANDARD}str", text, style=None if text.isprintable() else '"')


_KINDS: tuple[Any, ...] = (type(None), bool, int, float, list, tuple, dict, None)
_Dumper.yaml_representers = {kind: yaml.SafeDumper.yaml_representers[kind] for kind in _KINDS}  # None: others, raises
_Dumper.add_representer(str, _Dumper.represent_text)
_Dumper.add_representer(Ambiguous, _Dumper.represent_text)
_Loader.add_constructor(f"{_STANDARD}str", _Loader.construct_text)
_Loader.yaml_implicit_resolvers = {}
for _kind, (_pattern, _first) in _SCALARS.items():
    for _each in (_Loader, _Dumper):
        _each.add_implicit_resolver(_STANDARD + _kind, re.compile(f"^(?:{_pattern})$"), list(_first))


def parse_yaml(text: str | bytes) -> Any:
    """Return the value of YAML text. Raises: ValueError, one line that names the place."""
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f" (line {mark.line + 1}, column {mark.column + 1})"
        raise ValueError(", ".join(filter(None, (error.context, error.problem))) + where) from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def dump_yaml(value: object) -> str:
    """Return a value as YAML text, which parse_yaml reads back. Raises: TypeError if YAML has no form for it."""
    try:
        return yaml.dump(value, Dumper=_Dumper, sort_keys=False)
    except yaml.YAMLError as error:
        raise TypeError(str(error)) from error


def as_yaml(value: object) -> str:
    """Return one value as one line of YAML: null, true, [0, 1]. Raises: as dump_yaml."""
    try:
        text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=True, width=sys.maxsize)
    except yaml.YAMLError as error:
        raise TypeError(str(error)) from error
    # PyYAML ends a single plain value by a document end mark
    return text.removesuffix("\n").removesuffix("\n...")


def plain_form(text: str) -> str:
    """Return the true, false or decimal number that YAML 1.1 or Python reads in a word; empty if none."""
    if text.lower() in ("yes", "on", "true"):
        return "true"
    if text.lower() in ("no", "off", "false"):
        return "false"
    for base in (10, 0):
        with suppress(ValueError):
            return str(int(text, base))
    return ""
