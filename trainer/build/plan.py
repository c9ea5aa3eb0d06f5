"""Compute the numbers of a run from its config: steps and rates."""

from collections.abc import Callable
from inspect import signature
from typing import Any

from bigbatch.comm.communicator import Communicator
from bigbatch.errors import ConfigError
from bigbatch.parts import load_named
from bigbatch.trainer.build.images import count_steps_per_epoch
from bigbatch.trainer.config.batch import divide_batch, ghosts_per_microbatch
from bigbatch.trainer.config.dotted import is_import_path
from bigbatch.trainer.config.schedule import decay_epochs
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.optim.schedule import Schedule, mirrored_momentum
from bigbatch.trainer.step.plan import Plan

SCHEDULES = {
    "polynomial": "bigbatch.trainer.optim.schedule.polynomial",
    "cosine": "bigbatch.trainer.optim.schedule.cosine",
    "step": "bigbatch.trainer.optim.schedule.step_decay",
    "one_cycle": "bigbatch.trainer.optim.schedule.one_cycle",
    "cyclic": "bigbatch.trainer.optim.schedule.cyclic",
}
"""Name of a schedule -> import path of the function that makes it.

It gets those of base_lr, warmup_steps, total_steps, end_lr and its options that it names; cycle_epochs as cycle_steps.
"""


def make_plan(config: Config, communicator: Communicator, *, num_samples: int, first_step: int) -> Plan:
    """Return the plan of a run. Raises: ConfigError."""
    steps_per_epoch = count_steps_per_epoch(config, num_samples=num_samples)
    if first_step > steps_per_epoch * config.run.epochs:
        raise ConfigError(
            f"run.epochs={config.run.epochs} end at step {steps_per_epoch * config.run.epochs}, but the checkpoint is "
            f"of step {first_step}: give at least {-(-first_step // steps_per_epoch)}, or choose another run.directory"
        )
    division = divide_batch(config.batch, world_size=communicator.world_size)
    return Plan(
        seed=config.run.seed,
        first_step=first_step,
        num_steps=steps_per_epoch * config.run.epochs,
        steps_per_epoch=steps_per_epoch,
        division=division,
        microbatches=division.of(communicator.rank),
        global_batch_size=config.batch.global_batch_size,
        ghosts_per_microbatch=ghosts_per_microbatch(config.batch),
        log_every_steps=config.run.log_every_steps,
        eval_every_steps=steps_per_epoch * config.run.eval_every_epochs,
        eval_offset_steps=steps_per_epoch * config.run.eval_offset_epochs,
        checkpoint_every_steps=config.run.checkpoint_every_steps,
        compare_every_steps=config.run.compare_every_steps,
    )


def make_schedule_of(config: Config, plan: Plan) -> Schedule:
    """Make the schedule of the rate, in steps. Raises: ConfigError."""
    schedule, steps = config.schedule, plan.steps_per_epoch
    # not plan.num_steps, which is smaller if evaluations have ended the run
    epochs = schedule.warmup_epochs + decay_epochs(schedule, epochs=config.run.epochs)
    known: dict[str, Any] = {
        "base_lr": schedule.base_lr,
        "warmup_steps": round(schedule.warmup_epochs * steps),
        "total_steps": round(epochs * steps),
    }
    if is_import_path(schedule.name):
        from bigbatch.trainer.optim.imported import make_imported_schedule

        return make_imported_schedule(schedule.name, options=schedule.options or {}, **known)
    known["end_lr"] = schedule.end_lr
    for name, value in (schedule.options or {}).items():
        if name.endswith("_epochs") and value is not None:
            name = f"{name.removesuffix('_epochs')}_steps"
            value = [round(each * steps) for each in value] if isinstance(value, tuple | list) else value * steps
        known[name] = value
    make: Callable[..., Schedule] = load_named(SCHEDULES, schedule.name, key="schedule.name")
    try:
        return make(**{name: known[name] for name in signature(make).parameters if known.get(name) is not None})
    except ValueError as error:
        raise ConfigError(f"schedule: {error}") from error


def make_momentum_of(config: Config, rate: Schedule) -> Schedule | None:
    """Return the schedule of the momentum, which mirrors the rate's; None if the momentum is constant."""
    schedule, high = config.schedule, config.optimizer.momentum
    if schedule.low_momentum is None or high is None:
        return None
    lowest_lr = schedule.end_lr if schedule.name == "cyclic" else None
    return mirrored_momentum(
        rate, base_lr=schedule.base_lr, high=high, low=schedule.low_momentum, lowest_lr=lowest_lr or 0.0
    )
