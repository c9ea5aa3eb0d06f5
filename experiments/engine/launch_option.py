"""Parse --launch: how the ranks of a short run are started."""

import argparse
import dataclasses
import shlex
from typing import Any

from bigbatch.errors import ConfigError
from bigbatch.words import whole


@dataclasses.dataclass(frozen=True)
class Launch:
    """Words of `bigbatch launch` that start the ranks of a run; none for one process."""

    words: tuple[str, ...] = ()
    num_ranks: int = 1
    hosts: str | None = None

    @property
    def place(self) -> dict[str, Any]:
        where = self.words[0] if self.words else "local"
        return {"where": where, "ranks": self.num_ranks, "launch": {"hosts": self.hosts} if self.hosts else {}}


def parse_launch(text: str) -> Launch:
    """Parse the value of --launch, split as a shell would. Raises: ConfigError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--launch {text!r} is not a command line: {error}") from error
    if not words:
        return Launch()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("launcher", nargs="?", choices=("mpirun", "torchrun"))  # argparse would exit for a missing one
    parser.add_argument("--ranks", type=whole)
    parser.add_argument("--hosts")
    try:
        arguments, others = parser.parse_known_args(words)
    except argparse.ArgumentError:
        others = words
    if others or arguments.launcher is None or arguments.ranks is None or arguments.ranks < 1:
        raise ConfigError(
            f"--launch '{text}': give the words of bigbatch launch, such as 'mpirun --ranks 2', or "
            "'mpirun --ranks 16 --hosts n0:8,n1:8'"
        )
    return Launch(tuple(words), arguments.ranks, arguments.hosts)
