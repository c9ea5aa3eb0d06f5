"""Digests of all that a step makes, by which `bigbatch diff` finds where two runs part."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.input.microbatches import rank_microbatches
from bigbatch.trainer.run.microbatch_digests import (
    ACTIVATIONS,
    BEFORE_SUM,
    MIX,
    MODULUS,
    MicrobatchDigests,
    chosen_layers,
    word,
)
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.trainer.step.replicas import digest, replicas

PHASES = ("pictures", ACTIVATIONS, BEFORE_SUM, "gradients", "weights and state")
"""Of a step, in the order in which it makes them."""
BY_MICROBATCH = (ACTIVATIONS, BEFORE_SUM)
"""Phases that hold a digest for each microbatch of the global batch, in its order, whichever rank computed it."""


class DigestRecorder:
    """Records every so many steps, for the first rank's log, digests of what the step made.

    pictures: of all pictures of the global batch, as the model's device gets them, with labels and places, however the
    batch lies on ranks. activations: of layers that patterns name, and gradients before the sum: by microbatch; none of
    a captured step, in which Python does not see them. gradients: of the sums, by parameter; none of a sharded update,
    of which no rank has all.
    Raises: ConfigError for a pattern that names no layer.
    """

    def __init__(
        self,
        plan: Plan,
        parts: Parts,
        *,
        every_steps: int,
        layers: Sequence[str] = (),
        is_sharded: bool,
        is_captured: bool = False,
    ) -> None:
        self._plan, self._parts = plan, parts
        self._every_steps, self._is_sharded, self._is_captured = every_steps, is_sharded, is_captured
        self._pictures: torch.Tensor | None = None
        self._single = MicrobatchDigests(parts.model, layers=chosen_layers(parts.model, layers))

    def watch(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Pass batches on, and digest those of steps that are recorded."""
        if not self._every_steps:
            return batches
        return self._watched(batches)

    def _watched(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        plan, microbatches = self._plan, self._microbatches_of(self._parts.communicator.rank)
        for number, batch in enumerate(batches):
            step, index = divmod(number, plan.accumulation_steps)
            self._single.microbatch = microbatches[index]  # which the step draws before its forward, one at a time
            if self._is_due(plan.first_step + step + 1):
                found = digest_of_pictures(batch, first_place=microbatches[index] * len(batch.labels_B))
                self._pictures = found if index == 0 or self._pictures is None else self._pictures + found
            yield batch

    def _microbatches_of(self, rank: int) -> range:
        plan = self._plan
        return rank_microbatches(
            rank=rank, accumulation_steps=plan.accumulation_steps, ranks_per_ghost=plan.ranks_per_ghost
        )

    def _is_due(self, done: int) -> bool:
        return self._every_steps > 0 and done % self._every_steps == 0

    def before_step(self, step: int) -> None:
        """Look on in a step that is recorded."""
        if self._is_due(step + 1) and not self._is_captured:
            self._single.start()

    def record(self, done: int) -> dict[str, Any] | None:
        """Return what the log is to hold of the step that made them done; None where it is not due. Collective."""
        if not self._is_due(done):
            return None
        parts = self._parts
        parts.precision.settle()
        own = 0 if self._pictures is None else int(self._pictures)
        texts = parts.communicator.control.collect_text(
            json.dumps([own, self._single.take()]), what=f"collection of the digests of step {done}"
        )
        if parts.communicator.rank != 0:
            return {}
        gradients = {} if self._is_sharded else {n: p.grad for n, p in parts.model.named_parameters()}
        found = {name: gradient for name, gradient in gradients.items() if gradient is not None}
        told = [json.loads(text) for text in texts]
        return {
            "step": done,
            "pictures": word(sum(pictures for pictures, _ in told) % MODULUS),
            **self._by_microbatch([rows for _, rows in told]),
            "gradients": _words(found),
            "weights and state": _words(replicas(parts, done=done)),
        }

    def _by_microbatch(self, rows_P: Sequence[Any]) -> dict[str, Any]:
        """Put together what the ranks found, with the rank of each microbatch."""
        ranks = [0] * (len(rows_P) * self._plan.accumulation_steps)
        together: dict[str, dict[str, list[str]]] = {phase: {} for phase in BY_MICROBATCH}
        for rank, rows in enumerate(rows_P):
            for number in self._microbatches_of(rank):
                ranks[number] = rank
            for phase, name, number, found in rows:
                together[phase].setdefault(name, [""] * len(ranks))[number] = found
        return {"ranks": ranks, **together}


def digest_of_pictures(batch: Batch, *, first_place: int) -> torch.Tensor:
    """Return a digest (int64) of a microbatch that adds up, modulo 2**64, to that of the global batch.

    first_place: of its first picture in the global batch. The pictures that the loader gives, in their own order of
    rows, columns and channels, whatever their memory's is.
    """
    pictures_B = digest(image_CHW.contiguous() for image_CHW in batch.images_BCHW)
    places_B = 2 * torch.arange(first_place, first_place + len(pictures_B), device=pictures_B.device) + 1
    labels_B = batch.labels_B.to(pictures_B.device)
    return ((pictures_B * MIX + labels_B) * places_B).sum()


def _words(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    if not tensors:
        return {}
    # by rows and columns, whatever order the memory has: compute.channels_last changes no value
    found = digest(tensor.contiguous() for tensor in tensors.values())
    return {name: word(value) for name, value in zip(tensors, found.tolist(), strict=True)}
