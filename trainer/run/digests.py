"""Digests of all that a step makes, by which `bigbatch diff` finds where two runs part."""

from collections.abc import Iterator
from typing import Any

import torch

from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.input.microbatches import rank_microbatches
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.trainer.step.replicas import digest, replicas

MODULUS = 1 << 64
PHASES = ("pictures", "gradients", "weights and state")
"""Of a step, in the order in which it makes them."""


class DigestRecorder:
    """Records every so many steps, for the first rank's log, digests of what the step made.

    pictures: of all pictures of the global batch, as the model's device gets them, with labels and places, however the
    batch lies on ranks. gradients: of the sums, by parameter; none of a sharded update, of which no rank has all.
    """

    def __init__(self, plan: Plan, parts: Parts, *, every_steps: int, is_sharded: bool) -> None:
        self._plan, self._parts = plan, parts
        self._every_steps, self._is_sharded = every_steps, is_sharded
        self._pictures: torch.Tensor | None = None

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Pass batches on, and digest those of steps that are recorded."""
        if not self._every_steps:
            return batches
        return self._watched(batches)

    def _watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        plan = self._plan
        microbatches = rank_microbatches(
            rank=self._parts.communicator.rank,
            accumulation_steps=plan.accumulation_steps,
            ranks_per_ghost=plan.ranks_per_ghost,
        )
        for number, batch in enumerate(batches):
            step, index = divmod(number, plan.accumulation_steps)
            if self._is_due(plan.first_step + step + 1):
                found = digest_of_pictures(batch, first_place=microbatches[index] * len(batch.labels_B))
                self._pictures = found if index == 0 or self._pictures is None else self._pictures + found
            yield batch

    def _is_due(self, done: int) -> bool:
        return self._every_steps > 0 and done % self._every_steps == 0

    def record(self, done: int) -> dict[str, Any] | None:
        """Return what the log is to hold of the step that made them done; None where it is not due. Collective."""
        if not self._is_due(done):
            return None
        parts = self._parts
        parts.precision.settle()
        own = 0 if self._pictures is None else int(self._pictures)
        pictures = sum(map(int, parts.communicator.gather_text(str(own)))) % MODULUS
        if parts.communicator.rank != 0:
            return {}
        gradients = {} if self._is_sharded else {n: p.grad for n, p in parts.model.named_parameters()}
        found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        return {
            "step": done,
            "pictures": _word(pictures),
            "gradients": _words(found),
            "weights and state": _words(replicas(parts, done=done)),
        }


def digest_of_pictures(batch: Batch, *, first_place: int) -> torch.Tensor:
    """Return a digest (int64) of a microbatch that adds up, modulo 2**64, to that of the global batch.

    first_place: of its first picture in the global batch. The pictures that the loader gives, in their own order of
    rows, columns and channels, whatever their memory's is.
    """
    pictures_B = digest(image_CHW.contiguous() for image_CHW in batch.images_BCHW)
    places_B = 2 * torch.arange(first_place, first_place + len(pictures_B), device=pictures_B.device) + 1
    labels_B = batch.labels_B.to(pictures_B.device)
    return ((pictures_B * MIX + labels_B) * places_B).sum()


MIX = 0x9E3779B97F4A7C15 - MODULUS
"""An odd number without a pattern, so that labels and pictures do not make up for each other."""


def _words(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    if not tensors:
        return {}
    # by rows and columns, whatever order the memory has: compute.channels_last changes no value
    found = digest(tensor.contiguous() for tensor in tensors.values())
    return {name: _word(value) for name, value in zip(tensors, found.tolist(), strict=True)}


def _word(value: int) -> str:
    return f"{value % MODULUS:016x}"
