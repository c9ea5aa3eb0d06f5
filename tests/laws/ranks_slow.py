"""One rank of a job whose steps and evaluations say when they begin, and wait there for a test: `COMMAND ...`.

HELD_AT, HELD_UNTIL: the words at which it waits, and for which file. SLOW_PLOT_SECONDS: what the plot at the end takes
longer.
"""

import os
import time
from pathlib import Path
from typing import Any

from forked_ranks import bigbatch
from torch import Tensor

from bigbatch.trainer.inference import accuracy
from bigbatch.trainer.report import plot
from bigbatch.trainer.step.loop import TrainStep

step, predict, plot_run = TrainStep.__call__, accuracy.predict, plot.plot_run


def begin(what: str) -> None:
    """Say so, and wait where it is asked for."""
    print(f"{what} begins", flush=True)
    while f"{what} begins" == os.environ.get("HELD_AT") and not Path(os.environ["HELD_UNTIL"]).exists():
        time.sleep(0.02)


def told_step(self: TrainStep, number: int, *arguments: Any) -> None:
    """A step."""
    begin(f"step {number + 1}")
    step(self, number, *arguments)


def told_batch(*arguments: Any, **options: Any) -> Tensor:
    """A batch of an evaluation."""
    begin("evaluation batch")
    return predict(*arguments, **options)


def slow_plot(*arguments: Any, **options: Any) -> None:
    """The plot."""
    time.sleep(float(os.environ.get("SLOW_PLOT_SECONDS", "0")))
    plot_run(*arguments, **options)


def main(*command: str) -> int:
    """bigbatch, with an exchange before each batch of its short evaluations."""
    accuracy.BATCHES_BETWEEN_EXCHANGES = 1
    TrainStep.__call__, accuracy.predict = told_step, told_batch  # type: ignore[method-assign]
    plot.plot_run = slow_plot
    return bigbatch(*command)
