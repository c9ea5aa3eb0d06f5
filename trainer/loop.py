"""The training loop: it is handed ready objects and builds nothing."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.reducer import GradientReducer
from bigbatch.trainer.data.loader import Batch
from bigbatch.trainer.errors import TrainingDiverged
from bigbatch.trainer.precision import Precision
from bigbatch.trainer.seeding import seed_forward
from bigbatch.trainer.signals import StopRequest


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
    label_smoothing: float
    log_every_steps: int
    eval_every_steps: int
    checkpoint_every_steps: int


@dataclass(frozen=True)
class Parts:
    """What a step works with. statistics_N: all running statistics of batch norm, one flat tensor."""

    model: nn.Module
    statistics_N: Tensor
    precision: Precision
    optimizer: torch.optim.Optimizer
    schedule: Callable[[int], float]
    reducer: GradientReducer
    communicator: Communicator
    normalize: Callable[[Tensor], Tensor]
    stop: StopRequest


@dataclass(frozen=True)
class Hooks:
    """What happens around steps. Each is called on all ranks; records are sums or means over ranks."""

    on_report: Callable[[dict[str, Any]], None]
    evaluate: Callable[[int], dict[str, Any]]
    """(steps done) -> record of the evaluation. Collective."""
    save: Callable[[int, float | None], None]
    """(steps done, top-1 or None)."""
    before_step: Callable[[int], None] = lambda step: None
    """(step). Collective."""


@dataclass
class Totals:
    """What a run measured: seconds are this rank's, steps alone (no evaluation, no checkpoint)."""

    steps: int = 0
    step_seconds: float = 0.0
    input_wait_seconds: float = 0.0
    exposed_seconds: float = 0.0
    last_evaluation: dict[str, Any] = field(default_factory=dict)
    stopped_by: str | None = None


class Window:
    """Sums since the last report; they stay on the device until then."""

    def __init__(self, device: torch.device) -> None:
        self.sums_3 = torch.zeros(3, dtype=torch.float64, device=device)  # loss, correct, samples
        self.input_wait_seconds = 0.0
        self.start = time.perf_counter()
        self.steps = 0

    def count(self, loss: Tensor, logits_BK: Tensor, labels_B: Tensor) -> None:
        """Add one microbatch, without a host sync. loss is summed over its samples."""
        self.sums_3[0] += loss.detach()
        self.sums_3[1] += (logits_BK.detach().argmax(1) == labels_B).sum()
        self.sums_3[2] += labels_B.numel()


def train(plan: Plan, parts: Parts, hooks: Hooks, batches: Iterator[Batch]) -> Totals:
    """Run steps first_step to num_steps; stop early, with a checkpoint, when any rank was asked to.

    Collective. Raises: TrainingDiverged; PeerLostError; DataError from the input.
    """
    totals, window = Totals(), Window(parts.communicator.device)
    parts.model.train()
    for step in range(plan.first_step, plan.num_steps):
        hooks.before_step(step)
        train_step(step, plan, parts, batches, window)
        done = step + 1
        is_eval = done % plan.eval_every_steps == 0 or done == plan.num_steps
        is_save = plan.checkpoint_every_steps > 0 and done % plan.checkpoint_every_steps == 0
        if is_eval or is_save or done % plan.log_every_steps == 0:
            any_stop = report(done, plan, parts, hooks, window, totals)
            if is_eval:
                totals.last_evaluation = hooks.evaluate(done)
                hooks.save(done, totals.last_evaluation["top1"])
                parts.model.train()
            elif is_save or any_stop:
                hooks.save(done, None)
            if any_stop and done < plan.num_steps:
                totals.stopped_by = parts.stop.signal_name or "another rank's signal"
                break
            window = Window(parts.communicator.device)
    return totals


def train_step(step: int, plan: Plan, parts: Parts, batches: Iterator[Batch], window: Window) -> None:
    """One update from one global batch. Collective; no host sync on a GPU."""
    for group in parts.optimizer.param_groups:
        group["lr"] = parts.schedule(step)
    parts.reducer.zero_grad()
    span = partial(parts.communicator.timeline.span, row="step")
    for k in range(plan.accumulation_steps):
        is_last = k == plan.accumulation_steps - 1
        waiting = time.perf_counter()
        with span("input wait"):
            batch = next(batches)
        window.input_wait_seconds += time.perf_counter() - waiting
        images_BCHW = parts.normalize(batch.images_BCHW)
        labels_B = batch.labels_B.to(parts.communicator.device, non_blocking=True)
        microbatch = parts.communicator.rank * plan.accumulation_steps + k
        seed_forward(plan.seed, step=step, ghost=microbatch * plan.ghosts_per_microbatch)
        parts.reducer.is_active = is_last
        with span("forward"):
            logits_BK = parts.model(images_BCHW).float()
        if is_last:
            parts.reducer.start_extra(parts.statistics_N, label="all-reduce of batch-norm statistics")
        loss = F.cross_entropy(logits_BK, labels_B, label_smoothing=plan.label_smoothing, reduction="sum")
        with span("backward"):
            parts.precision.backward(loss / plan.global_batch_size)
        window.count(loss, logits_BK, labels_B)
    with span("wait for the sums"):
        parts.reducer.wait()
    with span("update"):
        parts.statistics_N.div_(parts.communicator.world_size)
        parts.precision.update_(parts.optimizer)
    window.steps += 1


def report(done: int, plan: Plan, parts: Parts, hooks: Hooks, window: Window, totals: Totals) -> bool:
    """Sum the window over ranks, pass it on, and agree whether to stop. Collective; syncs with the device."""
    exposed = parts.reducer.exposed.take_seconds()
    sums_3 = window.sums_3.tolist()  # waits for the device, so that the seconds below are the window's own
    seconds = time.perf_counter() - window.start
    mine = [*sums_3, seconds, window.input_wait_seconds, exposed, float(parts.stop.is_set)]
    all_7 = torch.tensor(mine, dtype=torch.float64, device=parts.communicator.device)
    loss, correct, samples, seconds_P, wait_P, exposed_P, stops = parts.communicator.sum_(
        all_7, label=f"report of step {done}"
    ).tolist()
    totals.steps += window.steps
    totals.step_seconds += seconds_P / parts.communicator.world_size
    totals.input_wait_seconds += wait_P / parts.communicator.world_size
    totals.exposed_seconds += exposed_P / parts.communicator.world_size
    if not abs(loss) < float("inf"):
        raise TrainingDiverged(
            f"the loss is {loss} at step {done}: lower schedule.base_lr or lengthen schedule.warmup_epochs"
        )
    record = {
        "step": done,
        "epoch": done / plan.steps_per_epoch,
        "loss": loss / samples,
        "top1": correct / samples,
        "lr": parts.schedule(done - 1),
        "loss_scale": parts.precision.loss_scale(),
        "images_per_second": samples * parts.communicator.world_size / seconds_P,
        "input_wait_fraction": wait_P / seconds_P,
        "exposed_communication_fraction": exposed_P / seconds_P,
    }
    hooks.on_report(record)
    return stops > 0
