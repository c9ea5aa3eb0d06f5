"""The config of a trial: the experiment with a trial's values, shortened; and the command that runs it."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from bigbatch.errors import ConfigError
from bigbatch.interpreter import bigbatch_argv
from bigbatch.numbers import whole
from bigbatch.trainer.config.schema import Config, all_keys, lookup
from bigbatch.trainer.config.sections import RunConfig, ScheduleConfig
from bigbatch.trainer.config.strict_yaml import as_yaml


def shorten(config: Config, *, epochs: int, evaluate_each: bool, directory: Path) -> Config:
    """Make the experiment in fewer epochs: what its config states in epochs or steps of a run shrinks with them.

    evaluate_each: after each epoch, so that there is something to judge by; else after the last one only.
    Raises: ConfigError.
    """
    share = epochs / config.run.epochs
    sizes, ema_every_steps = config.data.train_sizes, config.optimizer.ema_every_steps
    return dataclasses.replace(
        config,
        run=dataclasses.replace(
            to_the_last_epoch(config.run),
            directory=str(directory),
            epochs=epochs,
            eval_every_epochs=1 if evaluate_each else epochs,
            eval_offset_epochs=0,
            keep_checkpoints=1,
            resume="auto",
            divergence_steps=None,  # so short a run may still guess
        ),
        data=dataclasses.replace(
            config.data,
            # where two sizes fall on one epoch, the later one stays
            train_sizes=sizes and tuple({int(first * share): size for first, size in sizes}.items()),
        ),
        optimizer=dataclasses.replace(
            config.optimizer, ema_every_steps=ema_every_steps and max(1, round(ema_every_steps * share))
        ),
        schedule=_shorten_schedule(config.schedule, epochs=epochs, share=share),
    )


def _shorten_schedule(schedule: ScheduleConfig, *, epochs: int, share: float) -> ScheduleConfig:
    milestones = schedule.milestone_epochs
    warmup = min(schedule.warmup_epochs * share, epochs)
    rest = epochs - warmup  # rounding lets products reach past the end by the last digit of a float
    return dataclasses.replace(
        schedule,
        warmup_epochs=warmup,
        decay_epochs=None if schedule.decay_epochs is None else min(schedule.decay_epochs * share, rest),
        milestone_epochs=None if milestones is None else tuple(each * share for each in milestones),
        cycle_epochs=None if schedule.cycle_epochs is None else min(schedule.cycle_epochs * share, epochs),
    )


def to_the_last_epoch(run: RunConfig) -> RunConfig:
    """Make the same run, which neither a good result nor a lack of progress ends early."""
    return dataclasses.replace(run, target_top1=None, stop_metric=None, stop_after_evaluations=None)


def differences(base: Config, other: Config) -> list[str]:
    """List the options of `bigbatch train` that make other of base."""
    changed = [key for key in all_keys() if lookup(base, key) != lookup(other, key)]
    return [word for key in changed for word in (f"--{key}", as_yaml(_plain(lookup(other, key))))]


def _plain(value: object) -> object:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


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
