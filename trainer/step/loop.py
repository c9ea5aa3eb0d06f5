"""The training loop: it is handed ready objects and builds nothing."""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.errors import DataError
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.input.microbatches import rank_microbatches
from bigbatch.trainer.input.prepare_batch import PrepareBatch, Prepared
from bigbatch.trainer.input.stream import InputStream, gather_replaced
from bigbatch.trainer.machine.energy import EnergyMeter, NoEnergyMeter
from bigbatch.trainer.step.accumulation import WideAccumulation
from bigbatch.trainer.step.divergence import require_finite
from bigbatch.trainer.step.ema import NoAverage, WeightAverage
from bigbatch.trainer.step.execution import EagerExecution, Execution
from bigbatch.trainer.step.precision import Precision
from bigbatch.trainer.step.seeding import seed_forward
from bigbatch.trainer.step.signals import StopRequest
from bigbatch.trainer.step.totals import Totals, WindowFigures


@dataclass(frozen=True)
class Plan:
    """Numbers of a run, all derived from the config and the world size."""

    seed: int
    first_step: int
    num_steps: int
    steps_per_epoch: int
    accumulation_steps: int
    global_batch_size: int
    ghosts_per_microbatch: int
    ranks_per_ghost: int
    label_smoothing: float
    log_every_steps: int
    eval_every_steps: int
    eval_offset_steps: int
    checkpoint_every_steps: int

    def is_evaluation(self, done: int) -> bool:
        """An evaluation is due after so many steps."""
        return done % self.eval_every_steps == self.eval_offset_steps or done == self.num_steps


@dataclass(frozen=True)
class Parts:
    """What a step works with. statistics_N: all running statistics of batch norm, flat, and one spare element."""

    model: nn.Module
    statistics_N: Tensor
    precision: Precision
    accumulation: WideAccumulation
    optimizer: torch.optim.Optimizer
    schedule: Callable[[int], float]
    reducer: GradientReducer
    communicator: Communicator
    prepare: PrepareBatch
    normalize: Callable[[Tensor], Tensor]
    stop: StopRequest
    average: WeightAverage = field(default_factory=NoAverage)
    energy: EnergyMeter = field(default_factory=NoEnergyMeter)
    execution: Execution = field(default_factory=EagerExecution)
    notes: tuple[str, ...] = ()
    """Lines to say before the first step: how these parts differ from what the config asks for."""

    def close(self) -> None:
        """Let go of what would keep their memory, or the communicator from closing: hooks and captured graphs."""
        self.reducer.close()
        self.execution.close()


@dataclass(frozen=True)
class Hooks:
    """What happens around steps. Each is called on all ranks; records are of all ranks together."""

    on_report: Callable[[dict[str, Any]], None]
    evaluate: Callable[[int], dict[str, Any]]
    """(steps done) -> record of the evaluation. Collective."""
    save: Callable[[int, float | None], None]
    """(steps done, top-1 or None)."""
    skipped: Callable[[int, dict[int, str]], None] = lambda done, images: None
    """(steps done, positions of bad pictures and why): others stood in since the last time. Raises: DataError."""
    reason_to_end: Callable[[], str | None] = lambda: None
    """() -> after an evaluation, why the run ends with it; the same on all ranks."""
    before_step: Callable[[int], None] = lambda step: None
    """(step). Collective."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What a run works with from its first step to its last; the stream and the totals go on with it."""

    plan: Plan
    parts: Parts
    hooks: Hooks
    stream: InputStream
    totals: Totals


class Window:
    """Sums since the last report; they stay on the device until then, always in the same tensors."""

    def __init__(self, device: torch.device) -> None:
        self.sums_3 = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
        self.finite_steps = torch.zeros((), dtype=torch.int64, device=device)  # before the loss was not finite
        self.start_over()

    def start_over(self) -> None:
        """Nothing was counted yet."""
        self.sums_3.zero_()
        self.finite_steps.zero_()
        self.start = time.perf_counter()
        self.steps = 0

    def count(self, loss: Tensor, logits_BK: Tensor, labels_B: Tensor) -> None:
        """Add one microbatch, without a host sync. loss is summed over its samples."""
        self.sums_3[0] += loss.detach()
        self.sums_3[1] += (logits_BK.detach().argmax(1) == labels_B).sum()
        self.sums_3[2] += labels_B.numel()

    def end_step(self) -> None:
        """All microbatches of a step were counted."""
        self.finite_steps += self.sums_3[0].isfinite()  # a sum that is not finite stays so


def train(plan: Plan, parts: Parts, hooks: Hooks, batches: Iterator[Batch]) -> Totals:
    """Run steps first_step to num_steps; stop early, with a checkpoint, when any rank was asked to.

    Where the input of a rank fails, the state before that step is saved first.
    Collective. Raises: TrainingDiverged; PeerLostError; DataError from the input.
    """
    stream = InputStream(batches)
    totals = Totals(saved_step=plan.first_step, measures_waits=parts.execution.measures_waits)
    loop = Loop(plan=plan, parts=parts, hooks=hooks, stream=stream, totals=totals)
    window = Window(parts.communicator.device)
    parts.reducer.exposed.take_seconds()  # what was waited before, to restore a checkpoint, is of no step
    parts.energy.take_joules()
    parts.model.train()
    for step in range(plan.first_step, plan.num_steps):
        hooks.before_step(step)
        train_step(step, plan, parts, stream, window)
        done = step + 1
        is_eval = plan.is_evaluation(done)
        is_save = plan.checkpoint_every_steps > 0 and done % plan.checkpoint_every_steps == 0
        if is_eval or is_save or done % plan.log_every_steps == 0:
            any_stop = report(done, loop, window=window)
            if is_eval:
                with saving_on_failure(done, loop):
                    totals.last_evaluation = hooks.evaluate(done)
                hooks.save(done, totals.last_evaluation["top1"])
                parts.model.train()
            elif is_save or any_stop:
                hooks.save(done, None)
            if is_eval or is_save or any_stop:
                totals.saved_step = done
            if is_eval and hooks.reason_to_end():
                break
            if any_stop and done < plan.num_steps:
                totals.stopped_by = parts.stop.signal_name or "another rank's signal"
                break
            window.start_over()
            parts.energy.take_joules()  # what an evaluation or a checkpoint took is of no step
    return totals


@contextmanager
def saving_on_failure(done: int, loop: Loop) -> Iterator[None]:
    """Around what all ranks do together between steps: bad data end the run, but its state is saved before."""
    try:
        yield
    except DataError:
        save_before_end(done, loop)
        raise


def save_before_end(done: int, loop: Loop) -> None:
    """Save the state after step done, which the model is in, and return when it is on disk. Collective."""
    # a second checkpoint of a step would lack the accuracy of the first
    if done > loop.totals.saved_step:
        set_lr_(loop.parts, step=done - 1)
        loop.hooks.save(done, None)
    # rank 0 writes, and a launcher that sees another rank end would kill it in the midst of that
    loop.parts.communicator.gather_text("saved")


def train_step(step: int, plan: Plan, parts: Parts, stream: InputStream, window: Window) -> None:
    """One update from one global batch, or none where a rank has no batch. Collective; no host sync on a GPU.

    The window has to be the same in all steps.
    """
    set_lr_(parts, step=step)
    has_failed_1 = parts.execution(
        partial(work_on, plan=plan, parts=parts, window=window),
        draw(step, plan, parts, stream),
    )
    parts.average.update_(step + 1, skip_1=has_failed_1)
    window.steps += 1


def draw(step: int, plan: Plan, parts: Parts, stream: InputStream) -> Iterator[Prepared]:
    """The microbatches of a step, each drawn when it is asked for; what its forward draws at random is seeded then."""
    microbatches = rank_microbatches(
        rank=parts.communicator.rank,
        accumulation_steps=plan.accumulation_steps,
        ranks_per_ghost=plan.ranks_per_ghost,
    )
    for microbatch in microbatches:
        with parts.communicator.timeline.span("input wait", row="step"):
            batch = stream.draw(step=step)
        prepared = parts.prepare(batch)
        seed_forward(plan.seed, step=step, ghost=microbatch * plan.ghosts_per_microbatch)
        parts.statistics_N[-1].fill_(float(stream.failure is not None))  # x[-1] = number would wait for a GPU
        yield prepared


def work_on(microbatches: Iterable[Prepared], *, plan: Plan, parts: Parts, window: Window) -> Tensor:
    """A step from its pictures to the new weights; whether (bool, one element) a rank had none, so that all stays.

    What changes from step to step it reads from tensors that stay where they are, but for the learning rates, so that
    it can be captured as a CUDA graph. Collective; no host sync on a GPU.
    """
    parts.reducer.zero_grad()
    statistics_before_N = parts.statistics_N.clone()
    span = partial(parts.communicator.timeline.span, row="step")
    for index, prepared in enumerate(microbatches):
        is_last = index == plan.accumulation_steps - 1
        parts.reducer.is_active = is_last
        with span("forward"), parts.precision.forward():
            logits_BK = parts.model(prepared.images_BCHW).float()
        if is_last:
            parts.reducer.start_extra(parts.statistics_N, label="all-reduce of batch-norm statistics")
        loss = F.cross_entropy(logits_BK, prepared.targets, label_smoothing=plan.label_smoothing, reduction="sum")
        with span("backward"), parts.accumulation.microbatch(is_first=index == 0, is_last=is_last):
            parts.precision.backward(loss / plan.global_batch_size)
        window.count(loss, logits_BK, prepared.labels_B)
    with span("wait for the sums"):
        parts.reducer.wait()
    with span("update"):
        parts.statistics_N.div_(parts.communicator.world_size)
        has_failed_1 = parts.statistics_N[-1:] > 0
        parts.statistics_N.copy_(torch.where(has_failed_1, statistics_before_N, parts.statistics_N))
        parts.precision.update_(parts.optimizer, skip_1=has_failed_1)
    window.end_step()
    return has_failed_1


def set_lr_(parts: Parts, *, step: int) -> None:
    """The learning rate of a step into all groups, times the factor that a group may have of its own."""
    for group in parts.optimizer.param_groups:
        group["lr"] = parts.schedule(step) * group.get("lr_factor", 1.0)


def end_if_input_failed(num_failed: float, loop: Loop) -> None:
    """Save the state after the last step that all ranks had batches for, and end. Collective. Raises: DataError."""
    if not num_failed:
        return
    communicator, failure = loop.parts.communicator, loop.stream.failure
    texts = communicator.gather_text(json.dumps([failure.step, failure.reason]) if failure else "")
    failures = [(*json.loads(text), rank) for rank, text in enumerate(texts) if text]
    done, reason, rank = min(failures, key=lambda failure: failure[0])
    tell_skipped(done, loop)
    save_before_end(done, loop)
    where = f"rank {rank}: " if communicator.world_size > 1 else ""
    outcome = f"The run stopped after step {done} and goes on from there." if done else "No step was done."
    stop = "" if reason.endswith((".", "?", "!")) else "."
    raise DataError(f"{where}{reason}{stop} {outcome}")


def tell_skipped(done: int, loop: Loop) -> None:
    """Put together what the ranks skipped. Collective. Raises: DataError where it was too much, after saving."""
    # a rank draws on after the step at which the input of another one failed, and those steps do not count
    replaced = loop.stream.take_replaced(before=done)
    if images := gather_replaced(loop.parts.communicator, replaced):
        with saving_on_failure(done, loop):
            loop.hooks.skipped(done, images)


def report(done: int, loop: Loop, *, window: Window) -> bool:
    """Sum the window over ranks, pass it on, and agree whether to stop. Collective; syncs with the device."""
    parts, stream, totals = loop.parts, loop.stream, loop.totals
    communicator = parts.communicator
    exposed = parts.reducer.exposed.take_seconds()
    sums_3 = window.sums_3.tolist()  # waits for the device, so that the seconds below are the window's own
    own_seconds = time.perf_counter() - window.start
    counts = map(float, (parts.stop.is_set, stream.failure is not None, len(stream.replaced)))
    num_ranks, rank = communicator.world_size, communicator.rank
    shares_2P = [0.0] * (2 * num_ranks)  # each rank fills in its own two, so that the sum holds them all
    shares_2P[rank] = stream.take_wait_seconds() / own_seconds
    shares_2P[num_ranks + rank] = exposed / own_seconds
    mine = [*sums_3, own_seconds, exposed, parts.energy.take_joules(), *counts, *shares_2P]
    all_N = torch.tensor(mine, dtype=torch.float64, device=communicator.device)
    loss, correct, samples, seconds, exposed, joules, stops, failed, num_skipped, *shares_2P = communicator.sum_(
        all_N, label=f"report of step {done}"
    ).tolist()
    end_if_input_failed(failed, loop)
    measured = WindowFigures(
        steps=window.steps,
        samples=samples,
        seconds=seconds / num_ranks,
        exposed_seconds=exposed / num_ranks,
        joules=joules,
        waited_P=shares_2P[:num_ranks],
        exposed_P=shares_2P[num_ranks:],
    )
    totals.add(measured)
    require_finite(
        loss,
        first_step=done - window.steps,
        finite_steps=int(window.finite_steps),
        gather_text=communicator.gather_text,
    )
    loop.hooks.on_report(
        {
            "step": done,
            "epoch": done / loop.plan.steps_per_epoch,
            "loss": loss / samples,
            "top1": correct / samples,
            "lr": parts.schedule(done - 1),
            **parts.precision.figures(),
            **measured.record(measures_waits=totals.measures_waits),
        }
    )
    parts.precision.require_progress(done, is_last=done == loop.plan.num_steps)
    if num_skipped:
        tell_skipped(done, loop)
    return stops > 0
