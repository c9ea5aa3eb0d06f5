"""Inputs of the training loop: the numbers of a run, and its objects."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.trainer.config.batch import Division
from bigbatch.trainer.input.prepare_batch import PrepareBatch
from bigbatch.trainer.step.precision import Precision
from bigbatch.trainer.step.statistics import StepStatistics

if TYPE_CHECKING:
    from bigbatch.comm.communicator import Communicator
    from bigbatch.trainer.optim.two_weights import TwoWeights
    from bigbatch.trainer.step.accumulation import WideAccumulation
    from bigbatch.trainer.step.cuda_graph import CudaGraphExecution
    from bigbatch.trainer.step.ema import MovingAverage


NO_METER = partial(float, "nan")
"""Returns the energy of a step on the CPU, which is unknown."""


@dataclass(frozen=True)
class Plan:
    """Numbers of a run, all derived from the config, the world size and the rank."""

    seed: int
    first_step: int
    num_steps: int
    steps_per_epoch: int
    division: Division
    """Shares of all ranks in the microbatches of a step."""
    microbatches: Sequence[int]
    """This rank's share: the numbers of its microbatches in the global batch."""
    global_batch_size: int
    ghosts_per_microbatch: int
    log_every_steps: int
    eval_every_steps: int
    eval_offset_steps: int
    checkpoint_every_steps: int
    compare_every_steps: int

    def is_evaluation(self, done: int) -> bool:
        """Return whether an evaluation is due after this many steps. False at step 0, where a healed run may start."""
        return done > 0 and (done % self.eval_every_steps == self.eval_offset_steps or done == self.num_steps)

    def is_checkpoint(self, done: int) -> bool:
        """Return whether checkpoint_every_steps asks for a checkpoint after so many steps; never before the first."""
        return done > 0 and self.checkpoint_every_steps > 0 and done % self.checkpoint_every_steps == 0

    def is_report(self, done: int) -> bool:
        """Return whether a report is due after so many steps; a stop reports even if none is due."""
        return self.is_evaluation(done) or self.is_checkpoint(done) or done % self.log_every_steps == 0

    def without_steps(self) -> "Plan":
        """Return the plan without steps, for a run that its earlier evaluations have ended."""
        return replace(self, num_steps=self.first_step)


@dataclass(frozen=True)
class Parts:
    """Objects of a training step."""

    model: nn.Module
    statistics: StepStatistics
    precision: Precision
    accumulation: "WideAccumulation | None"
    """Adds up half-precision gradients of several microbatches; None: backward adds them."""
    optimizer: torch.optim.Optimizer
    schedule: Callable[[int], float]
    reducer: GradientReducer
    communicator: "Communicator"
    prepare: PrepareBatch
    normalize: Callable[[Tensor], Tensor]
    loss: Callable[[Tensor, Tensor], Tensor]
    """Loss: logits_BK in fp32 and targets, indices (B) or shares (B, K) -> sum over their images."""
    average: "MovingAverage | None" = None
    """Average of the weights, which evaluations use; None without one."""
    take_joules: Callable[[], float] = NO_METER
    """Returns the energy of the GPU since its last call."""
    graphs: "CudaGraphExecution | None" = None
    """Replays captured steps; None: Python calls each kernel."""
    two_weights: "TwoWeights | None" = None
    """The optimizer's sets of weights for training and evaluation; None if it has one."""
    momentum: Callable[[int], float] | None = None
    """Momentum by step; None if constant."""
    is_compiled: bool = False
    """Whether the model is compiled: with compute.compile_fallback it may not be."""
    notes: tuple[str, ...] = ()
    """Lines to say before the first step: how these parts differ from what the config asks for."""

    @property
    def is_captured(self) -> bool:
        """Return whether steps are replayed: Python does not see them, so nothing in them is timed or counted."""
        return self.graphs is not None

    def set_lr_(self, *, step: int) -> None:
        """Set the learning rate of a step in all groups, times the group's lr_factor if it has one.

        Sets the momentum, too, if it changes with the step.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule(step) * group.get("lr_factor", 1.0)
            if self.momentum is not None:
                group["momentum"] = self.momentum(step)

    def evaluation_weights(self) -> AbstractContextManager[list[Tensor]]:
        """Swap in the weights for evaluation, such as Schedule-Free's average; swap back on exit.

        Yields copies of the training weights; an empty list if both are the same.
        """
        if self.two_weights is None:
            return nullcontext([])
        return self.two_weights.for_evaluation(on_change=self.precision.write_half_)

    def average_state(self, done: int) -> dict[str, Tensor]:
        """Return the average of the weights after step done, by name; empty without one."""
        return {} if self.average is None else self.average.state_dict(done)

    def close(self) -> None:
        """Remove hooks and captured graphs, which would keep memory and the communicator open."""
        self.reducer.close()
        if self.accumulation:
            self.accumulation.close()
        if self.graphs is not None:
            self.graphs.close()
