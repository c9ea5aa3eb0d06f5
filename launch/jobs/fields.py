"""Describe a field of JobSpec: its option, the text of its help, and its legal values."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bigbatch.errors import LaunchOptionError

REQUEST = "requests to the scheduler (default: the cluster's)"
KUBERNETES = "Kubernetes"
GROUPS = ("ranks", REQUEST, "container", KUBERNETES)
"""Groups of options in the help."""


@dataclass(frozen=True)
class Words:
    """Form of legal values, and what to use instead of others."""

    pattern: str
    use: str


@dataclass(frozen=True)
class Option:
    """An option with a value: `--gpus-per-node 8` on the command line, `gpus_per_node: 8` in a file."""

    name: str
    help: str
    kind: Callable[[str], Any] = str
    choices: tuple[str, ...] | None = None
    default: str | None = None
    metavar: str | None = None
    repeats: bool = False
    """Whether it may be repeated; its value is a list."""
    group: str = ""
    """One of GROUPS, for an option of all jobs."""
    also: tuple["Option", ...] = ()
    """Other options from which make_job derives the field."""
    parse: Callable[[Any], Any] = lambda value: value
    """Returns the field's value from the option's, as a tuple if it repeats. Raises: LaunchOptionError."""
    words: Words | None = None
    """Form of the field's value, or of each value in a tuple; None: all are legal."""
    at_least: int | None = None
    check: Callable[[Any], object] = lambda value: None
    """Further check of a value. Raises: LaunchOptionError."""

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def read(self, stated: Any) -> Any:
        """Return the field's value from the option's, which may be None. Raises: LaunchOptionError."""
        if stated is None:
            return None
        return self.checked(self.parse(tuple(stated) if self.repeats else stated))

    def checked(self, value: Any) -> Any:
        """Return value, if the field may have it. Raises: LaunchOptionError naming option, value and a legal one."""
        if value is None:
            return None
        for word in value if isinstance(value, tuple) else (value,):
            if self.words and not re.fullmatch(self.words.pattern, word):
                raise LaunchOptionError(f"{self.flag} {word!r} is not valid. Use {self.words.use}")
        if self.at_least is not None and value < self.at_least:
            raise LaunchOptionError(f"{self.flag} {value} must be at least {self.at_least}")
        self.check(value)
        return value


def option(group: str, help: str = "", *, name: str = "", default: Any = None, **facts: Any) -> Any:
    """Return a field of JobSpec with its Option.

    help: empty if it shares the option of another field. name: the option's, if it is not the field's. default: the
    field's; () if the option repeats. facts: further fields of Option.
    """
    default = () if facts.get("repeats") else default
    return field(default=default, metadata={"option": Option(name, help, group=group, **facts)})


ranks, request, containers, pods = (partial(option, group) for group in GROUPS)
"""Each returns a field of JobSpec with an option of this group; arguments: as of option."""
