"""Compute a microbatch again, whichever rank had it, and digest its gradient: for replays and gradient audits."""

from collections.abc import Sequence

import torch

from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.run.digests import MicrobatchDigests, Row, digests_of_pictures
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.trainer.step.seeding import seed_forward


def recompute(
    parts: Parts, plan: Plan, batch: Batch, *, step: int, microbatch: int, layers: Sequence[str] = ()
) -> tuple[list[int], list[Row]]:
    """Return digests of a microbatch's images (B), and of its activations and gradients by the present weights.

    step: counted from 0, under way or next. microbatch: its number in the global batch. layers: those whose
    activations are digested. Weights, gradients, sums of the step and running statistics stay as they are; random
    generators are left as the step leaves them. Not collective. Waits for the device.
    """
    digests = MicrobatchDigests(parts.model, layers=layers)
    digests.microbatch = microbatch
    pictures_B = digests_of_pictures(batch)
    prepared = parts.prepare(batch)
    sums_N = parts.statistics.to_sum_N.clone()
    seed_forward(plan.seed, step=step, ghost=microbatch * plan.ghosts_per_microbatch)
    digests.start()
    try:
        with parts.precision.forward():
            logits_BK = parts.model(prepared.images_BCHW).float()
        loss = parts.precision.scaled(parts.loss(logits_BK, prepared.targets) / plan.global_batch_size)
        # hooks see the gradients, and neither the parameters nor the reducer get them
        torch.autograd.grad(loss, [p for p in parts.model.parameters() if p.requires_grad], allow_unused=True)
    finally:
        digests.stop()
    parts.statistics.to_sum_N.copy_(sums_N)
    seed_forward(plan.seed, step=step, ghost=plan.global_batch_size)
    return pictures_B.tolist(), digests.take()
