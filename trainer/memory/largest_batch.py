"""The largest microbatch that fits a device's memory, found by trying."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from bigbatch.comm.connect import connect
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.trainer.build.job import without_choices
from bigbatch.trainer.build.parts import make_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.config.batch_remedy import divisors
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.config.sections import BatchConfig
from bigbatch.trainer.input.base import Batch, Request
from bigbatch.trainer.input.stream import InputStream
from bigbatch.trainer.machine.host import free_memory, is_out_of_memory, wait_for
from bigbatch.trainer.step.cuda_graph import WARM_UP_STEPS
from bigbatch.trainer.step.loop import TrainStep

STEPS_PER_EPOCH = 1000
"""Steps of an epoch: as many as in real runs, so that schedule and weight average are legal."""
MOST_IMAGES = 1 << 20
"""Largest microbatch that is tried."""


@dataclass(frozen=True)
class SizeSearch:
    """Result of a search. size: the largest tried size that fits, None if none does."""

    size: int | None
    is_complete: bool
    """Whether the time sufficed for all sizes that had to be tried."""


def sizes_within(batch: BatchConfig, *, most: int) -> list[int]:
    """Return the microbatches, rising up to most, that divide the config's ghost batch or consist of whole ones."""
    parts = [size for size in divisors(batch.bn_span)[:-1] if size <= most]
    return [*parts, *range(batch.bn_span, min(most, MOST_IMAGES) + 1, batch.bn_span)]


def largest_fitting(
    sizes: Sequence[int], fits: Callable[[int], bool], *, is_last_near: bool, seconds: float = float("inf")
) -> SizeSearch:
    """Find the largest of rising sizes that fits, by bisection, assuming that all smaller ones fit, too.

    is_last_near: the last size is not far too large, so begin in the middle; else double from the first size until one
    does not fit. No try begins after the given seconds.
    """
    deadline = time.monotonic() + seconds
    low, high, is_doubling = -1, len(sizes), not is_last_near  # sizes up to low fit, sizes from high do not
    while high - low > 1:
        if time.monotonic() > deadline:
            return SizeSearch(sizes[low] if low >= 0 else None, is_complete=False)
        middle = (low + high) // 2
        if is_doubling:
            # sizes are not evenly spaced: the next one that is at least twice as large
            wanted = 2 * sizes[low] if low >= 0 else 0
            middle = next((i for i in range(low + 1, high) if sizes[i] >= wanted), high - 1)
        if fits(sizes[middle]):
            low = middle
        else:
            high, is_doubling = middle, False
    return SizeSearch(sizes[low] if low >= 0 else None, is_complete=True)


def fits_memory(config: Config, size: int, *, device: torch.device, num_microbatches: int = 1) -> bool:
    """Return whether training steps of generated images fit, on this rank alone; frees their memory afterwards.

    A sharded update is tried with all shares on this rank, and a captured step with its CUDA graphs, which need memory
    of their own.
    """
    num_untimed = WARM_UP_STEPS if config.compute.cuda_graph else 1
    try:
        run_steps(config, size, device=device, num_microbatches=num_microbatches, num_untimed=num_untimed)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        is_fitting = False
    else:
        is_fitting = True
    free_memory(device)  # outside of the except block: the error's frames hold tensors
    return is_fitting


def run_steps(
    config: Config,
    size: int,
    *,
    device: torch.device,
    num_microbatches: int = 1,
    num_untimed: int = 1,
    num_timed: int = 1,
) -> float:
    """Train on generated images, on this rank alone; return the mean seconds of the timed steps at the end.

    All steps have learning rate 0 and the same images, for any division into microbatches: each repeats the first. A
    size below batch.bn_span is one ghost batch. No collectives. From the second step on, the optimizer's state
    takes memory, too. Raises: RuntimeError; MemoryError.
    """
    config, communicator = _alone(config, size, num_microbatches=num_microbatches), connect(env=ALONE, device=device)
    plan = make_plan(config, communicator, num_samples=STEPS_PER_EPOCH * config.batch.global_batch_size, first_step=0)
    batches = _generated(config, device)  # before the parts: if it does not fit, no parts have to be closed
    parts = replace(make_parts(config, communicator, plan=plan, tuned=None), schedule=lambda step: 0.0)
    num_steps, start = num_untimed + num_timed, 0.0
    try:
        stream, train_step = InputStream(iter(batches * num_steps)), TrainStep(plan, parts)
        parts.model.train()
        for step in range(num_steps):
            if step == num_untimed:
                wait_for(device)
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats(device)  # without the peak of cuDNN's search
                start = time.perf_counter()
            train_step(step, stream)
        wait_for(device)
        return (time.perf_counter() - start) / num_timed
    finally:
        parts.close()
        communicator.connection.abandon()


def _alone(config: Config, size: int, *, num_microbatches: int) -> Config:
    """Return the config for one rank with microbatches of size, and a weight average from the first step on."""
    config = without_choices(config, world_size=1)
    is_mixable = min(config.batch.bn_span, size) > 1
    return replace(
        config,
        batch=replace(
            config.batch,
            global_batch_size=size * num_microbatches,
            microbatch_size=size,
            bn_span=min(config.batch.bn_span, size),
        ),
        model=replace(config.model, weights=None),
        optimizer=replace(config.optimizer, ema_every_steps=1 if config.optimizer.ema_decay is not None else None),
        augment=config.augment if is_mixable else replace(config.augment, mixup_alpha=0.0, cutmix_alpha=0.0),
    )


def _generated(config: Config, device: torch.device) -> list[Batch]:
    """Return the microbatches of a step, of the largest images that the config trains on."""
    size = max([config.data.image_size, *(each for _, each in config.data.train_sizes or ())])
    total, generator = config.batch.global_batch_size, torch.Generator(device).manual_seed(0)
    shape = (total, size, size, 3)
    images_NHWC = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
    labels_N = torch.randint(config.data.num_classes, (total,), device=device, generator=generator)
    batches = []
    for part in torch.arange(total).split(config.batch.microbatch_size):
        labels_B, request = labels_N[part[0] : part[-1] + 1], Request(0, part.numpy(), np.ones(len(part), bool))
        images_BCHW = images_NHWC[part[0] : part[-1] + 1].permute(0, 3, 1, 2)
        batches.append(Batch(images_BCHW, labels_B, labels_B >= 0, request))
    return batches
