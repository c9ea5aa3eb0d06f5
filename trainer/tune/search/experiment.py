"""What a search is about, checked as a whole before anything runs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.batch import accumulation_steps
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.range_test import KEY as RANGE_TEST
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.short_run import shorten
from bigbatch.trainer.tune.search.records import Metric
from bigbatch.trainer.tune.search.short_run import Launch, parse_launch
from bigbatch.trainer.tune.search.space import Axis, flags, parse_space

RATE = "schedule.base_lr"


@dataclass(frozen=True, kw_only=True)
class Search:
    """Describes a search as the command line states it."""

    config: tuple[str, ...]
    """Words of `bigbatch train`: --config NAME and overrides."""
    space: tuple[str, ...]
    """A word for each --space."""
    folder: Path
    trials: int
    """Of all rounds together."""
    rounds: int
    epochs: int
    """Of a trial."""
    metric: Metric
    prune: bool
    """Stop a trial that is worse than the median of the others."""
    parallel: int
    """Trials at once."""
    launch: tuple[str, ...]
    """Words of `bigbatch launch` for each trial; none for one process."""


@dataclass(frozen=True)
class Experiment:
    """Holds a search whose settings make sense."""

    search: Search
    axes: tuple[Axis, ...]
    base: Config
    launch: Launch

    def config(self, values: dict[str, str]) -> Config:
        """Make the whole experiment with these values. Raises: ConfigError."""
        config = _load(self.search, self.axes, values)
        accumulation_steps(config.batch, world_size=self.launch.num_ranks)
        return config

    def short_config(self, values: dict[str, str], *, directory: Path) -> Config:
        """Make what the trial with these values runs. Raises: ConfigError."""
        search = self.search
        return shorten(self.config(values), epochs=search.epochs, evaluate_each=search.prune, directory=directory)

    @property
    def prune_from_epoch(self) -> int:
        """Return the first epoch after the warm-up, in which a large learning rate has not shown yet."""
        short = self.short_config({}, directory=self.search.folder)
        return math.floor(short.schedule.warmup_epochs) + 1

    def round_sizes(self) -> list[int]:
        """Share out the trials of each round: as even as can be, the first ones take what is left over."""
        share, rest = divmod(self.search.trials, self.search.rounds)
        return [share + (number < rest) for number in range(self.search.rounds)]

    def identity(self) -> dict[str, Any]:
        """Name all that decides which trials there are and what comes out; not how many run at once, nor where."""
        search = self.search
        return {
            "config": dump_config(self.base),
            "space": list(search.space),
            "trials": search.trials,
            "rounds": search.rounds,
            "epochs": search.epochs,
            "metric": search.metric,
            "prune": "median" if search.prune else "none",
        }


def make_experiment(search: Search) -> Experiment:
    """Check everything that can be checked without running. Raises: ConfigError."""
    for name in ("trials", "rounds", "epochs", "parallel"):
        if getattr(search, name) < 1:
            raise ConfigError(f"--{name} {getattr(search, name)} must be at least 1")
    if search.rounds > search.trials:
        raise ConfigError(f"--rounds {search.rounds} exceed --trials {search.trials}: each round needs a trial")
    axes, launch = parse_space(search.space), parse_launch(search.launch)
    base = _load(search, axes, {})
    experiment = Experiment(search, axes, base, launch)
    experiment.short_config({}, directory=search.folder)
    for axis, text in zip(axes, search.space, strict=True):
        # a value that is not legal fails now, before any trial runs
        for end in axis.ends:
            try:
                experiment.short_config({axis.key: end}, directory=search.folder)
            except ConfigError as error:
                raise ConfigError(*(f"--space {text}: at {end}, {line}" for line in error.args)) from error
    return experiment


def _load(search: Search, axes: Sequence[Axis], values: dict[str, str]) -> Config:
    """Load the experiment with these values; where the rate is searched, without the range test of a file."""
    is_searched = any(axis.key == RATE for axis in axes)
    without = [f"--{RANGE_TEST}=null"] if is_searched and RATE not in values else []
    return load_config([*search.config, *without, *flags(values)], prog="bigbatch tune search")
