"""Check that the settings of the schedule fit each other and the length of the run."""

import json
import math
import shlex
from collections.abc import Container, Iterator, Mapping
from typing import Any

from bigbatch.trainer.config.dotted import is_import_path
from bigbatch.trainer.config.kinds import check_options
from bigbatch.trainer.config.sections import SCHEDULES, ComputeConfig, OptimizerConfig, ScheduleConfig

STATED_ELSEWHERE = {
    "base_lr": "schedule.base_lr",
    "warmup_steps": "schedule.warmup_epochs",
    "total_steps": "schedule.decay_epochs",
}
"""Arguments of a schedule by import path -> the keys of the config that give them."""


def check_schedule_name(name: str) -> Iterator[str]:
    """Yield an error for a name that is neither one of SCHEDULES nor an import path. Imports nothing."""
    if name not in SCHEDULES and not is_import_path(name):
        yield (
            f"schedule.name={name} must be one of {', '.join(map(repr, SCHEDULES))}, or the import path of a function, "
            "such as mypackage.schedules.restarts"
        )


def decay_epochs(schedule: ScheduleConfig, *, epochs: int) -> float:
    """Return the epochs from the end of the warm-up to the last learning rate, in a run of that many epochs."""
    return epochs - schedule.warmup_epochs if schedule.decay_epochs is None else schedule.decay_epochs


def shorter_schedule(values: Mapping[str, Any], *, epochs: int, kept: Container[str]) -> Iterator[str]:
    """Yield the options that shorten a schedule of that many epochs to run.epochs, except for kept keys."""
    share = values["run.epochs"] / epochs
    if share >= 1:
        return
    options = []
    for key in (
        "schedule.warmup_epochs",
        "schedule.decay_epochs",
        "schedule.options.milestone_epochs",
        "schedule.options.cycle_epochs",
        "data.train_sizes",
    ):
        value = values.get(key)
        if not value or key in kept:
            continue
        if key == "data.train_sizes":
            shorter: Any = list({int(first * share): size for first, size in value}.items())
        else:
            shorter = (
                [_rounded_down(each * share) for each in value]
                if isinstance(value, tuple)
                else _rounded_down(value * share)
            )
        options.append(f"--{key} {shlex.quote(json.dumps(shorter))}")
    if options:
        yield f"to shorten the run from {epochs} epochs to {values['run.epochs']}, add {' '.join(options)}"


def _rounded_down(epochs: float) -> float:
    """Keep four decimals: parts of a run that are rounded down fit into it."""
    return math.floor(epochs * 1e4) / 1e4


def schedule_notes(schedule: ScheduleConfig, *, epochs: int) -> list[str]:
    """List log lines about a schedule: a run that ends with its warm-up is legal, but seldom intended."""
    if not 0 < epochs <= schedule.warmup_epochs:
        return []
    return [
        f"the learning rate only rises: schedule.warmup_epochs={schedule.warmup_epochs:g} of run.epochs={epochs}; a "
        f"shorter run needs a shorter warm-up, such as --schedule.warmup_epochs {epochs / 5:g}"
    ]


def check_momentum(
    low: float, schedule: ScheduleConfig, optimizer: OptimizerConfig, compute: ComputeConfig
) -> Iterator[str]:
    """Yield an error if the momentum cannot mirror the rate. low: schedule.low_momentum."""
    high, key = optimizer.momentum, f"schedule.low_momentum={low:g}"
    if high is None:
        yield f"{key} has no meaning with optimizer.name={optimizer.name}: set it to null"
    elif low >= high:
        yield f"{key} must be below optimizer.momentum={high:g}, from which the momentum falls: give less"
    if compute.cuda_graph:
        yield f"{key} cannot change in replayed steps: set it to null, or compute.cuda_graph to false"
    if schedule.name == "cyclic" and schedule.end_lr is not None and schedule.end_lr >= schedule.base_lr:
        yield f"{key} needs a rate that rises: set schedule.end_lr below schedule.base_lr={schedule.base_lr:g}"


def check_schedule(schedule: ScheduleConfig, *, epochs: int) -> Iterator[str]:
    warmup, options = schedule.warmup_epochs, schedule.options or {}
    if is_import_path(schedule.name):
        stated = [argument for argument in STATED_ELSEWHERE if argument in options]
        refusals = [f"schedule.options must not state {each}: set {STATED_ELSEWHERE[each]} instead" for each in stated]
    else:
        refusals = list(check_options("schedule", schedule.name, options))
    if refusals:
        yield from refusals
        return
    if schedule.name == "step" and options.get("milestone_epochs") is None:
        yield "schedule.options.milestone_epochs is null, but schedule.name=step needs it: give a value"
    if schedule.name == "cyclic":
        if warmup:
            yield (
                f"schedule.warmup_epochs={warmup:g} has no meaning with schedule.name=cyclic: each cycle begins by "
                "rising: set it to 0"
            )
        if (cycle := options.get("cycle_epochs", 0)) > epochs:
            yield f"schedule.options.cycle_epochs={cycle:g} exceeds run.epochs={epochs}: give at most that"
    if warmup > epochs:
        yield f"schedule.warmup_epochs={warmup} is longer than run.epochs={epochs}: give at most that"
    elif schedule.decay_epochs is not None:
        yield from _check_decay(schedule, schedule.decay_epochs, epochs=epochs)
    if schedule.end_lr is not None and schedule.end_lr > schedule.base_lr:
        yield f"schedule.end_lr={schedule.end_lr} exceeds schedule.base_lr={schedule.base_lr}: give at most that"
    if milestones := options.get("milestone_epochs"):
        yield from _check_milestones(milestones, warmup=warmup, epochs=epochs)


def _check_decay(schedule: ScheduleConfig, decay: float, *, epochs: int) -> Iterator[str]:
    warmup = schedule.warmup_epochs
    if schedule.name in ("step", "cyclic"):
        yield f"schedule.decay_epochs={decay:g} has no meaning with schedule.name={schedule.name}: set it to null"
    elif warmup + decay > epochs:
        yield (
            f"schedule.warmup_epochs={warmup:g} and schedule.decay_epochs={decay:g} are longer than run.epochs={epochs}"
            ": set schedule.decay_epochs to null, which means the rest of the run"
        )


def _check_milestones(milestones: tuple[float, ...], *, warmup: float, epochs: int) -> Iterator[str]:
    rising = tuple(sorted({m for m in milestones if m >= warmup}))
    if milestones != rising:
        yield (
            f"schedule.options.milestone_epochs={list(milestones)} must rise from schedule.warmup_epochs={warmup} on: "
            f"{list(rising)} does"
        )
        return
    within = [m for m in milestones if m < epochs]
    if len(within) < len(milestones):
        yield (
            f"schedule.options.milestone_epochs={list(milestones)} reaches past the end of run.epochs={epochs}: "
            f"{within} does not"
        )
