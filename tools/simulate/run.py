"""Hours of a run: its steps, evaluations and checkpoints, and the cost of failures. Pure."""

import math
from dataclasses import dataclass

from bigbatch.errors import SimulationError
from bigbatch.tools.simulate.shapes import ModelShape
from bigbatch.tools.simulate.step import Compute
from bigbatch.trainer.config.sections import IMAGENET_COUNTS, RunConfig
from bigbatch.words import count

FORWARD_SHARE = 1 / 3
"""Cost of evaluating an image as a share of training on it."""
STATE_BYTES = 8
"""Bytes of a parameter in a checkpoint: its fp32 weight and its momentum."""
COPY_BYTES_PER_SECOND = 2.4e9
"""Rate of a checkpoint's copy on the first rank, for which training waits; it is written while training continues.
MEASURED in CPU time on two busy cores: 77 ms (61 to 162) for 189 MB, in benchmarks/results/checkpoint.json."""
RESTART_SECONDS = 60.0
"""Seconds from a failure to the first new step. ASSUMED: emulated clusters took 7 to 34 s; starts of GPUs and their
library add to it."""
MIN_EFFECTIVE = 0.01


@dataclass(frozen=True)
class Failures:
    """How often a node fails, and the cost of each failure in addition to the lost steps."""

    node_hours: float
    """Mean time between failures of one node."""
    restart_seconds: float = RESTART_SECONDS


@dataclass(frozen=True)
class RunTime:
    steps: float
    evaluations: float
    checkpoints: float
    failures: float = 0.0
    """Restarts, and steps that were repeated."""

    @property
    def total(self) -> float:
        return self.steps + self.evaluations + self.checkpoints + self.failures

    @property
    def effective_share(self) -> float:
        return 1 - self.failures / self.total


def time_of_run(
    run: RunConfig,
    *,
    shape: ModelShape,
    compute: Compute,
    step_seconds: float,
    steps_per_epoch: float,
    num_devices: int,
    num_nodes: int,
    failures: Failures | None = None,
) -> RunTime:
    """Return the hours of an experiment's run: steps, and evaluations and checkpoints by its settings, and failures.

    Raises: SimulationError if so many nodes fail so often that it makes hardly any progress.
    """
    evaluations = run.epochs / run.eval_every_epochs
    num_steps = run.epochs * steps_per_epoch
    asked = [run.checkpoint_every_steps] if run.checkpoint_every_steps else []
    checkpoints = evaluations + sum(num_steps / every for every in asked)
    planned = RunTime(
        num_steps * step_seconds / 3600,
        evaluations * FORWARD_SHARE * compute.seconds(IMAGENET_COUNTS["val"] / num_devices) / 3600,
        checkpoints * STATE_BYTES * shape.num_parameters / COPY_BYTES_PER_SECOND / 3600,
    )
    if failures is None:
        return planned
    between = min([run.eval_every_epochs * steps_per_epoch, *asked])
    effective = effective_share(between * step_seconds, failures, num_nodes=num_nodes)
    if effective < MIN_EFFECTIVE:
        raise SimulationError(
            f"a run on {count(num_nodes, 'node')} almost never reaches its next checkpoint if each node fails every "
            f"{failures.node_hours:g} h: write checkpoints more often (run.checkpoint_every_steps)"
        )
    return RunTime(planned.steps, planned.evaluations, planned.checkpoints, planned.total * (1 / effective - 1))


def effective_share(interval_seconds: float, failures: Failures, *, num_nodes: int) -> float:
    mean = failures.node_hours * 3600 / num_nodes
    ratio = interval_seconds / mean
    if ratio > 700:  # exp of more overflows a float
        return 0.0
    return interval_seconds / ((mean + failures.restart_seconds) * math.expm1(ratio))
