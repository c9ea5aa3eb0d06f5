"""Squared norms of the microbatch gradients and of the global gradient, for the gradient noise scale."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from bigbatch.trainer.step.plan import Parts, Plan


@dataclass(frozen=True)
class SquaredNorms:
    """Squared norms of gradients of mean losses in one step: mean over microbatches, and the global one."""

    step: int
    """Number of steps done, including this one."""
    microbatch: float
    global_batch: float


class GradientNoise:
    """Measures the gradient of each microbatch every every_steps, by hooks, without another backward.

    Hooks get it before it is added to those of other microbatches, and before any sum over ranks, in the precision of
    the model's gradients. Other steps have no hooks, and nothing waits for the device before take(). A step whose
    gradients are not all finite does not count.
    """

    def __init__(self, plan: Plan, parts: Parts, *, every_steps: int) -> None:
        self._parts, self._every_steps = parts, every_steps
        self._places, self._num_microbatches = plan.microbatches, plan.division.num_microbatches
        self._hooks: list[RemovableHandle] = []
        self._norms: list[Tensor] = []
        """Norms of the gradients of the current microbatch, one per parameter."""
        self._squares: list[Tensor] = []
        """Squared norms of this rank's microbatches in this step."""
        self._scale = torch.ones(())
        self._steps: list[int] = []
        self._packed: list[Tensor] = []
        """Per measured step since take(): a square per microbatch, 0 for other ranks' ones, then the global square."""

    def before_step(self, step: int) -> None:
        """Register the hooks if this step is measured."""
        if self._every_steps == 0 or (step + 1) % self._every_steps:
            return
        parts = self._parts
        # read now: the update may set another scale for the next step
        self._scale = parts.precision.scaled(torch.ones((), device=parts.communicator.device))
        weights = [p for p in parts.model.parameters() if p.requires_grad]

        def take_norm(gradient: Tensor) -> None:
            self._norms.append(torch.linalg.vector_norm(gradient.detach(), dtype=torch.float32))

        self._hooks = [p.register_hook(take_norm) for p in weights]
        # a forward of the model begins a microbatch: recomputation in backward calls blocks, never the whole model
        self._hooks.append(parts.model.register_forward_pre_hook(lambda *_: self._end_microbatch()))

    def _end_microbatch(self) -> None:
        if self._norms:
            self._squares.append(torch.stack(self._norms).double().square().sum())
            self._norms = []

    def end_backward(self) -> None:
        """Remove the hooks: later computations are not measured."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._end_microbatch()

    @torch.no_grad()
    def after_step(self, done: int) -> None:
        """Remove the hooks, and compute the norm of the summed gradient. Collective if the update is sharded."""
        self.end_backward()
        if not self._squares:
            return
        precision = self._parts.precision
        precision.wait_for_weights()  # this collective must not overtake the gathers of new weights
        packed_M = torch.zeros(self._num_microbatches + 1, dtype=torch.float64, device=self._scale.device)
        # backward's loss is divided by the global batch: a microbatch's mean is larger by the number of microbatches
        factor = (self._num_microbatches / self._scale.double()).square()
        for place, square in zip(self._places, self._squares, strict=True):
            packed_M[place].copy_(square * factor)
        global_norm = precision.grad_norm().double()
        if self._parts.communicator.rank == 0:  # all ranks have it, and take() sums over ranks
            packed_M[-1].copy_(global_norm.square())
        self._squares = []
        self._steps.append(done)
        self._packed.append(packed_M)

    def take(self) -> list[SquaredNorms]:
        """Return the norms measured since the last call, equal on all ranks. Collective; waits for the device.

        Each microbatch has its own place, so the sum over ranks only adds zeros: apart from the rounding of the
        gradients, the norms do not depend on how microbatches are divided among ranks.
        """
        if not self._steps:
            return []
        flat_N = torch.cat(self._packed)
        self._parts.communicator.sum_(flat_N, label=f"squared norms of step {self._steps[-1]}")
        rows = flat_N.view(len(self._steps), -1)
        means = torch.stack([rows[:, :-1].mean(1), rows[:, -1]], dim=1)
        is_finite = means.isfinite().all(1)
        found = [
            SquaredNorms(step, *pair)
            for step, pair, counts in zip(self._steps, means.tolist(), is_finite.tolist(), strict=True)
            if counts
        ]
        self._steps, self._packed = [], []
        return found
