"""One training step, and the measured steps of a run. Takes ready objects and builds none."""

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bigbatch.errors import CaptureFailed, DataError
from bigbatch.parts import load
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.input.prepare_batch import Prepared
from bigbatch.trainer.input.stream import InputStream, gather_replaced
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.trainer.step.window import Totals, Window, WindowSums

if TYPE_CHECKING:
    from bigbatch.trainer.step.cuda_graph import CudaGraphExecution

_PRIME = 1_000_003
_NUM_SEEDS = 2**63
"""Seeds must be below this on every device of torch."""


def seed_forward(seed: int, *, step: int, ghost: int) -> None:
    """Seed the draws of a forward pass (such as dropout's), by torch, numpy or Python.

    ghost: number of the microbatch's first ghost batch; of its part if ranks share ghost batches. So a resumed run
    draws what the uninterrupted one drew, and with one ghost batch per microbatch any world size draws the same.
    """
    # + 1: with seed 0, step 0 must differ from torch.manual_seed(seed), with which models draw their weights
    position = ((seed * _PRIME + step) * _PRIME + ghost + 1) % _NUM_SEEDS
    # on a host without one, torch.manual_seed keeps a traceback for each kind of device: 1 ms
    seed_torch = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed
    seed_torch(position)
    random.seed(position)
    np.random.seed(position % 2**32)


class TrainStep:
    """Performs one optimizer update with one global batch; skips it on all ranks if any rank has no batch.

    Collective; no host sync on a GPU. One object makes all steps: a captured step writes to the same window each time.
    """

    def __init__(self, plan: Plan, parts: Parts) -> None:
        self.plan, self.parts = plan, parts
        self.window = Window(parts.communicator.device)
        self.is_whole = True
        """Whether weights and state are those after a whole step; unknown during a captured step."""
        self._accumulate = parts.accumulation.microbatch if parts.accumulation else nullcontext
        self._fold = [parts.reducer.fold] if parts.reducer.grid else []
        self._after_update = [parts.average.update_] if parts.average else []
        self._span: Callable[[str], AbstractContextManager[Any]] = nullcontext
        self.before_update: Sequence[Callable[[], object]] = ()
        """Called in each step after the gradients are summed and before the weights change."""

    def __call__(self, step: int, stream: InputStream) -> None:
        """Set the learning rate, train on this rank's microbatches, and update the average of the weights."""
        self.parts.set_lr_(step=step)
        # outside the captured work, so that it is the same for all microbatches but the last
        self.parts.reducer.zero_grad()
        if self.parts.accumulation:
            self.parts.accumulation.start_over()
        timeline = self.parts.communicator.transport.timeline
        self._span = partial(timeline.span, row="step") if timeline else nullcontext
        microbatches, graphs = self.microbatches_of(step, stream), self.parts.graphs
        is_skipped_1 = self.train_on(microbatches) if graphs is None else self._replay(graphs, microbatches)
        for update in self._after_update:
            update(step + 1, skip_1=is_skipped_1)
        self.is_whole = True
        self.window.steps += 1

    def _replay(self, graphs: "CudaGraphExecution", microbatches: Iterator[tuple[Prepared, bool]]) -> Tensor:
        try:
            return graphs(self.train_on, microbatches)
        except CaptureFailed:
            self.is_whole = True  # a capture computes nothing
            self.parts.reducer.discard()
            raise

    def microbatches_of(self, step: int, stream: InputStream) -> Iterator[tuple[Prepared, bool]]:
        """Yield the microbatches of a step, and whether each is the last; seed the random draws of its forward."""
        plan, parts = self.plan, self.parts
        for microbatch in plan.microbatches:
            with self._span("input wait"):
                batch = stream.draw(step=step)
            prepared = parts.prepare(batch)
            seed_forward(plan.seed, step=step, ghost=microbatch * plan.ghosts_per_microbatch)
            if stream.failure is not None:
                parts.statistics.tell_failure_()
            yield prepared, microbatch == plan.microbatches[-1]
        # for the optimizer, whose random numbers depend on the step alone: no ghost batch has this number
        seed_forward(plan.seed, step=step, ghost=plan.global_batch_size)

    def train_on(self, microbatches: Iterable[tuple[Prepared, bool]]) -> Tensor:
        """Update the weights; return whether (bool, one element) a rank had no images, so that nothing changed.

        A CUDA graph captures this. So values that change between steps, or between microbatches before the last, are
        read from tensors that keep their address; CudaGraphExecution does that for the learning rates.
        """
        plan, parts, span = self.plan, self.parts, self._span
        for prepared, is_last in microbatches:
            parts.reducer.is_active = is_last  # only in the last backward are finished gradients sent
            with span("forward"), parts.precision.forward():
                logits_BK = parts.model(prepared.images_BCHW).float()
            if is_last:
                # final after the last forward, so their all-reduce overlaps backward
                parts.reducer.start_extra(parts.statistics.to_sum_N, label="all-reduce of batch-norm statistics")
            loss = parts.loss(logits_BK, prepared.targets)
            with span("backward"), self._accumulate(is_last):
                # sums over microbatches and ranks are then the mean over the global batch
                parts.precision.backward(loss / plan.global_batch_size)
            for fold in self._fold if not is_last else ():
                fold()
            self.window.count(loss, logits_BK, prepared.labels_B)
        with span("wait for the sums"):
            parts.reducer.wait()
        for look in self.before_update:
            look()
        with span("update"):
            self.is_whole = False
            is_skipped_1 = parts.statistics.average_()
            parts.precision.update_(parts.optimizer, skip_1=is_skipped_1)
        self.window.end_step()
        return is_skipped_1


class InputLost(DataError):
    """The input of a rank failed. Up to step done all ranks had a batch; the weights are those after it."""

    def __init__(self, reason: str, *, done: int, replaced: dict[int, str]) -> None:
        super().__init__(reason)
        self.done = done
        self.replaced = replaced
        """Position -> reason, of the bad images in these steps since the last report."""


class Steps:
    """Makes the steps of a run, and measures them from report to report. All methods are collective."""

    def __init__(self, plan: Plan, parts: Parts, batches: Iterator[Batch]) -> None:
        self.plan, self.parts = plan, parts
        self.stream = InputStream(batches)
        self.train_step = TrainStep(plan, parts)
        self.totals = Totals(measures_waits=not parts.is_captured)
        parts.model.train()
        parts.reducer.exposed.take_seconds()  # discard waits before the first step, as of a restore
        self.start_over()

    def start_over(self) -> None:
        """Start measuring again: the time of an evaluation or a checkpoint belongs to no step."""
        self.train_step.window.start_over()
        self.parts.take_joules()

    def report(self, done: int) -> tuple[dict[str, Any], dict[int, str]]:
        """Sum what was measured since the last report over ranks. Syncs with the device.

        Returns: the record, and position -> reason of the bad images that were replaced since then.
        Raises: InputLost; TrainingDiverged.
        """
        plan, parts, window = self.plan, self.parts, self.train_step.window
        communicator = parts.communicator
        mine_N = self._window_of_this_rank().pack(communicator.device)
        sums = WindowSums.unpack(communicator.sum_(mine_N, label=f"report of step {done}"))
        if sums.num_failed:
            raise self._lost_input()
        self.totals.add(sums, steps=window.steps)
        if not math.isfinite(sums.loss):
            raise load("bigbatch.trainer.step.divergence.not_finite")(
                sums.loss, first_step=done - window.steps, counts=communicator.gather(int(window.finite_steps))
            )
        record = {
            "step": done,
            "epoch": done / plan.steps_per_epoch,
            "loss": sums.loss / sums.samples,
            "top1": sums.correct / sums.samples,
            "lr": parts.schedule(done - 1),
            **parts.precision.figures(),
            **sums.record(measures_waits=self.totals.measures_waits),
        }
        return record, self._gather_replaced(before=done) if sums.num_skipped else {}

    def _window_of_this_rank(self) -> WindowSums:
        parts, stream, window = self.parts, self.stream, self.train_step.window
        exposed_seconds = parts.reducer.exposed.take_seconds()
        loss, correct, samples = window.sums_3.tolist()  # waits for the device, so that seconds cover the window
        seconds = time.perf_counter() - window.start
        rank, num_ranks = parts.communicator.rank, parts.communicator.world_size

        def at_own_place(share: float) -> tuple[float, ...]:  # so that the sum over ranks holds each rank's share
            return tuple(share if each == rank else 0.0 for each in range(num_ranks))

        return WindowSums(
            loss=loss,
            correct=correct,
            samples=samples,
            seconds=seconds,
            exposed_seconds=exposed_seconds,
            joules=parts.take_joules(),
            num_failed=stream.failure is not None,
            num_skipped=len(stream.replaced),
            waited_P=at_own_place(stream.take_wait_seconds() / seconds),
            exposed_P=at_own_place(exposed_seconds / seconds),
        )

    def _lost_input(self) -> InputLost:
        """Return the error for the first step that lacked a batch on some rank."""
        communicator, failure = self.parts.communicator, self.stream.failure
        failures_P = communicator.gather([failure.step, failure.reason] if failure else None)
        failures = [(*each, rank) for rank, each in enumerate(failures_P) if each]
        done, reason, rank = min(failures, key=lambda failure: failure[0])
        where = f"rank {rank}: " if communicator.world_size > 1 else ""
        outcome = f"The run stopped after step {done}." if done else "No step was done."
        stop = "" if reason.endswith((".", "?", "!")) else "."
        return InputLost(f"{where}{reason}{stop} {outcome}", done=done, replaced=self._gather_replaced(before=done))

    def _gather_replaced(self, *, before: int) -> dict[int, str]:
        # steps that a rank ran after the input of another one failed do not count
        return gather_replaced(self.parts.communicator, self.stream.take_replaced(before=before))
