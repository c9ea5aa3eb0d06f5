"""How a trial is started: words of `bigbatch launch`, and the GPUs that it sees."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bigbatch.errors import ConfigError
from bigbatch.interpreter import bigbatch_argv
from bigbatch.numbers import whole


@dataclasses.dataclass(frozen=True)
class Launch:
    """Says how the ranks of a trial are started: words of `bigbatch launch`; none for one process."""

    words: tuple[str, ...]
    num_ranks: int
    is_here: bool
    """On this host alone."""


def parse_launch(words: Sequence[str]) -> Launch:
    """Parse what --launch says. Raises: ConfigError."""
    if not words:
        return Launch((), 1, is_here=True)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("launcher", nargs="?", choices=("mpirun", "torchrun"))  # for a missing one it would exit
    parser.add_argument("--ranks", type=whole)
    parser.add_argument("--hosts")
    try:
        arguments, others = parser.parse_known_args(list(words))
    except argparse.ArgumentError:
        others = list(words)
    if others or arguments.launcher is None or arguments.ranks is None or arguments.ranks < 1:
        raise ConfigError(
            f"--launch '{' '.join(words)}': give the words of bigbatch launch, such as 'mpirun --ranks 2', or "
            "'mpirun --ranks 16 --hosts n0:8,n1:8'"
        )
    return Launch(tuple(words), arguments.ranks, is_here=arguments.hosts is None)


def train_argv(options: Sequence[str], *, base: Path, launch: Launch, gpus: Sequence[str]) -> list[str]:
    """Train base with those options. gpus: the only ones that the process may see; none: as it is."""
    words = ["train", "--config", str(base), *options]
    if launch.words:
        words = ["launch", *launch.words, "--", *words]
    seen = ["env", f"CUDA_VISIBLE_DEVICES={','.join(gpus)}"] if gpus else []
    return [*seen, *bigbatch_argv(), *words]


def gpus_of(slot: int, *, gpus: Sequence[str], launch: Launch) -> list[str]:
    """List the GPUs of the trials that run at this place among those at once: a rank's own, taken in turn.

    None, which leaves all as it is, where the ranks of a trial need all GPUs anyway or run on other hosts.
    """
    if not launch.is_here or launch.num_ranks >= len(gpus):
        return []
    first = slot * launch.num_ranks
    return [gpus[(first + rank) % len(gpus)] for rank in range(launch.num_ranks)]
