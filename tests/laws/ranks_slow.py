"""One rank of a job whose steps and evaluations take their time, and say when they begin: `COMMAND ...`.

SLOW_STEP_SECONDS, SLOW_BATCH_SECONDS, SLOW_PLOT_SECONDS: what a step, a batch of an evaluation, and the plot at the end
take longer.
"""

import os
import time
from typing import Any

from forked_ranks import bigbatch
from torch import Tensor

from bigbatch.trainer.inference import accuracy
from bigbatch.trainer.run import output
from bigbatch.trainer.step.loop import TrainStep

step, predict, plot_run = TrainStep.__call__, accuracy.predict, output.plot_run


def slow_step(self: TrainStep, number: int, *arguments: Any) -> None:
    """A step."""
    print(f"step {number + 1} begins", flush=True)
    time.sleep(float(os.environ.get("SLOW_STEP_SECONDS", "0")))
    step(self, number, *arguments)


def slow_batch(*arguments: Any, **options: Any) -> Tensor:
    """A batch of an evaluation."""
    print("evaluation batch begins", flush=True)
    time.sleep(float(os.environ.get("SLOW_BATCH_SECONDS", "0")))
    return predict(*arguments, **options)


def slow_plot(*arguments: Any, **options: Any) -> None:
    """The plot."""
    time.sleep(float(os.environ.get("SLOW_PLOT_SECONDS", "0")))
    plot_run(*arguments, **options)


def main(*command: str) -> int:
    """bigbatch, slowly, with an exchange before each batch of its short evaluations."""
    accuracy.BATCHES_BETWEEN_EXCHANGES = 1
    TrainStep.__call__, accuracy.predict = slow_step, slow_batch  # type: ignore[method-assign]
    output.plot_run = slow_plot
    return bigbatch(*command)
