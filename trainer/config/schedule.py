"""Which settings of the schedule and of the evaluations go together, and fit into the run."""

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.sections import RunConfig, ScheduleConfig


def decay_epochs(schedule: ScheduleConfig, *, epochs: int) -> float:
    """Count the epochs from the end of the warm-up to the last learning rate, in a run of so many epochs."""
    return epochs - schedule.warmup_epochs if schedule.decay_epochs is None else schedule.decay_epochs


def check_evaluations(run: RunConfig) -> None:
    """Raise ConfigError where the first evaluation lies past the interval."""
    if run.eval_offset_epochs >= run.eval_every_epochs:
        raise ConfigError(
            f"run.eval_offset_epochs={run.eval_offset_epochs} must be below run.eval_every_epochs="
            f"{run.eval_every_epochs}: give at most {run.eval_every_epochs - 1}"
        )


def check_schedule(schedule: ScheduleConfig, *, epochs: int) -> None:
    """Raise ConfigError where the schedule contradicts itself or a run of so many epochs."""
    warmup = schedule.warmup_epochs
    if warmup > epochs:
        raise ConfigError(f"schedule.warmup_epochs={warmup} is longer than run.epochs={epochs}: give at most that")
    if schedule.end_lr is not None and schedule.end_lr > schedule.base_lr:
        raise ConfigError(
            f"schedule.end_lr={schedule.end_lr} exceeds schedule.base_lr={schedule.base_lr}: give at most that"
        )
    _check_decay(schedule, epochs=epochs)
    _check_milestones(schedule.milestone_epochs or (), warmup=warmup, epochs=epochs)


def _check_decay(schedule: ScheduleConfig, *, epochs: int) -> None:
    warmup, decay = schedule.warmup_epochs, schedule.decay_epochs
    if decay is None:
        return
    if schedule.name == "step":
        raise ConfigError(f"schedule.decay_epochs={decay:g} has no meaning with schedule.name=step: set it to null")
    if warmup + decay > epochs:
        raise ConfigError(
            f"schedule.warmup_epochs={warmup:g} and schedule.decay_epochs={decay:g} are longer than run.epochs={epochs}"
            ": set schedule.decay_epochs to null, which means the rest of the run"
        )


def _check_milestones(milestones: tuple[float, ...], *, warmup: float, epochs: int) -> None:
    rising = tuple(sorted({m for m in milestones if m >= warmup}))
    if milestones != rising:
        raise ConfigError(
            f"schedule.milestone_epochs={list(milestones)} must rise from schedule.warmup_epochs={warmup} on: "
            f"{list(rising)} does"
        )
    within = [m for m in milestones if m < epochs]
    if len(within) < len(milestones):
        raise ConfigError(
            f"schedule.milestone_epochs={list(milestones)} reaches past the end of run.epochs={epochs}: {within} does "
            "not"
        )
