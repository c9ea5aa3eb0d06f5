"""Run some training steps of a config, with reports but without files, evaluations and checkpoints."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from bigbatch.comm.communicator import Communicator
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.build.images import stage_data
from bigbatch.trainer.build.parts import make_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.build.whitening import fit_whitening_
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.observe.observer import CHECKS, Observed, attach
from bigbatch.trainer.step.loop import Steps
from bigbatch.trainer.step.plan import Parts
from bigbatch.trainer.step.stop_request import StopRequest

if TYPE_CHECKING:
    from bigbatch.comm.tuning.tuned import Tuned


@contextmanager
def few_steps(
    config: Config,
    communicator: Communicator,
    *,
    num_steps: int,
    say: Callable[[str], None],
    schedule: Callable[[int], float] | None = None,
    tuned: "Tuned | None" = None,
) -> Iterator[tuple[Parts, Callable[..., str | None]]]:
    """Yield the parts of a training of num_steps steps, and run(on_report, after_step), which trains. Collective.

    run returns the signal that stopped it, or None. Raises: TrainingDiverged.
    schedule: learning rates in place of the config's. say: gets a line when a signal asks for a stop.
    """
    local, _ = stage_data(config, communicator.connection)
    splits = build_input.make_splits(local, communicator)
    whole = make_plan(config, communicator, num_samples=splits.train.num_samples, first_step=0)
    parts = make_parts(config, communicator, plan=whole, tuned=tuned, train=splits.train)
    if schedule is not None:
        parts = dataclasses.replace(parts, schedule=schedule)
    fit_whitening_(parts.model, splits.train, config=config, communicator=communicator)
    stop = StopRequest(launcher=communicator.env.agent_pid)
    plan = dataclasses.replace(whole, num_steps=num_steps, log_every_steps=1)

    def run(
        on_report: Callable[[dict[str, Any]], None], after_step: Callable[[int], None] = lambda done: None
    ) -> str | None:
        steps = Steps(plan, parts, build_input.train_batches(config, splits.train, plan=plan))
        observed = Observed(config=config, plan=plan, parts=parts, communicator=communicator, say=say)
        checks = attach(observed, keys=CHECKS)
        with stop.watch(
            communicator.connection.control, acknowledge=lambda by: say(f"{by}: will stop after this step")
        ):
            for step in range(num_steps):
                for check in checks:
                    check.before_step(step)
                steps.train_step(step, steps.stream)
                after_step(step + 1)
                parts.precision.wait_for_weights()  # now the optimizer's state may be read
                for check in checks:
                    check.before_report(step + 1)
                record, _ = steps.report(step + 1)
                for check in checks:
                    record |= check.figures(step + 1)
                on_report(record)
                parts.precision.require_progress(step + 1, is_last=step + 1 == num_steps)
                if stop.is_due() and step + 1 < num_steps:
                    return stop.asked_by
                steps.start_over()
        return None

    try:
        yield parts, run
    finally:
        parts.close()
        splits.close()
