"""Shorten an experiment to fewer epochs, and list the options in which two experiments differ."""

import dataclasses
from pathlib import Path
from typing import Any

from bigbatch.trainer.config.kinds import flat_options
from bigbatch.trainer.config.schema import KEYS, Config, lookup
from bigbatch.trainer.config.sections import RunConfig, ScheduleConfig
from bigbatch.trainer.config.strict_yaml import as_yaml


def shorten(config: Config, *, epochs: int, evaluate_each: bool, directory: Path) -> Config:
    """Return the experiment in fewer epochs: values in epochs or steps of a run shrink in proportion.

    evaluate_each: evaluate after each epoch; else after the last one only. Raises: ConfigError.
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
            divergence_steps=None,  # the loss of a run this short may still be that of a guess
        ),
        data=dataclasses.replace(
            config.data,
            # if two sizes fall on one epoch, the later one stays
            train_sizes=sizes and tuple({int(first * share): size for first, size in sizes}.items()),
        ),
        optimizer=dataclasses.replace(
            config.optimizer, ema_every_steps=ema_every_steps and max(1, round(ema_every_steps * share))
        ),
        schedule=_shorten_schedule(config.schedule, epochs=epochs, share=share),
    )


def _shorten_schedule(schedule: ScheduleConfig, *, epochs: int, share: float) -> ScheduleConfig:
    options = dict(schedule.options or {})
    if options.get("milestone_epochs"):
        options["milestone_epochs"] = tuple(each * share for each in options["milestone_epochs"])
    if "cycle_epochs" in options:
        options["cycle_epochs"] = min(options["cycle_epochs"] * share, epochs)
    warmup = min(schedule.warmup_epochs * share, epochs)
    rest = epochs - warmup  # rounding lets products reach past the end by the last digit of a float
    return dataclasses.replace(
        schedule,
        warmup_epochs=warmup,
        decay_epochs=None if schedule.decay_epochs is None else min(schedule.decay_epochs * share, rest),
        options=options or None,
    )


def to_the_last_epoch(run: RunConfig) -> RunConfig:
    """Return the same run without early stopping and without a target accuracy."""
    return dataclasses.replace(run, target_top1=None, stop_metric=None, stop_after_evaluations=None)


def differences(base: Config, other: Config) -> list[str]:
    """List the options of `bigbatch train` that turn base into other."""
    before, after = (flat_options({key: lookup(config, key) for key in KEYS}) for config in (base, other))
    changed = {key: value for key, value in after.items() if key not in before or before[key] != value}
    return [word for key, value in changed.items() for word in (f"--{key}", as_yaml(value))]


def tuples_as_lists(value: Any) -> Any:
    """Return a value of a config as YAML holds it: tuples are lists."""
    if isinstance(value, dict):
        return {name: tuples_as_lists(each) for name, each in value.items()}
    return [tuples_as_lists(each) for each in value] if isinstance(value, tuple) else value
