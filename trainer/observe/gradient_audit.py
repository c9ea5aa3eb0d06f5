"""Gradient audits: each rank recomputes a microbatch of another rank, and both must get the same bits."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from bigbatch.errors import DataError, ReplicasDiffer
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.observe.digests import (
    BEFORE_SUM,
    IMAGES,
    MicrobatchDigests,
    Row,
    digest_in_order,
    digests_of_images,
)
from bigbatch.trainer.observe.finite_check import describe_device, gradients_again
from bigbatch.trainer.observe.observer import Observed, Observer
from bigbatch.trainer.step.plan import Parts, Plan


def recompute(
    parts: Parts, plan: Plan, batch: Batch, *, step: int, microbatch: int, layers: Sequence[str] = ()
) -> tuple[list[int], list[Row]]:
    """Return digests of a microbatch's images (B), and of its activations and gradients with the current weights.

    step: the current or next one, counted from 0. microbatch: its number in the global batch. layers: those whose
    activations are digested. Weights, gradients, sums of the step and running statistics stay unchanged; random
    generators are left as the step leaves them. Not collective. Waits for the device.
    """
    digests = MicrobatchDigests(parts.model, layers=layers)
    digests.microbatch = microbatch
    images_B = digests_of_images(batch)
    digests.start()
    try:
        gradients_again(parts, plan, batch, step=step, microbatch=microbatch)
    finally:
        digests.stop()
    return images_B.tolist(), digests.take()


NamedDigests = dict[str, str]
"""Digests of a microbatch's images and of its gradients, by name."""


@dataclass(frozen=True)
class AuditChoice:
    """The microbatches that an audit compares, and the ranks that recompute them: equal on all ranks."""

    microbatches_P: Sequence[int]
    """Each rank's audited microbatch, by its number in the global batch."""
    shift: int

    @property
    def num_ranks(self) -> int:
        return len(self.microbatches_P)

    def audited_by(self, rank: int) -> int:
        """Return the rank whose microbatch the given rank recomputes: itself if it is alone."""
        return (rank + self.shift) % self.num_ranks

    def auditor_of(self, rank: int) -> int:
        """Return the rank that recomputes the given rank's microbatch."""
        return (rank - self.shift) % self.num_ranks

    def third_of(self, rank: int) -> int | None:
        """Return the rank that decides if the given rank and its auditor differ; None if there is no third rank."""
        auditor = self.auditor_of(rank)
        others = ((auditor + k) % self.num_ranks for k in range(1, self.num_ranks))
        return next((other for other in others if other != rank), None)


def choose_audit(plan: Plan, *, step: int, num_ranks: int) -> AuditChoice:
    """Choose the microbatches to audit in a step, from the seed and the step alone."""
    bits = int.from_bytes(hashlib.sha256(f"audit of step {step} with seed {plan.seed}".encode()).digest(), "big")
    shift = 1 + bits % (num_ranks - 1) if num_ranks > 1 else 0
    found = []
    for rank in range(num_ranks):
        numbers = plan.division.of(rank)
        found.append(numbers[(bits >> 64) % len(numbers)])
    return AuditChoice(found, shift)


class GradientAudit(Observer):
    """Audits gradients before their sum every run.audit_every_steps, and before each checkpoint and evaluation.

    All ranks audit in the same step: if only one did, the others would wait for it anyway. So the first audit finds a
    device that always computes wrongly.
    """

    def __init__(self, observed: Observed) -> None:
        plan, parts = observed.plan, observed.parts
        assert observed.read is not None
        self._plan, self._parts, self._read, self._log = plan, parts, observed.read, observed.log
        self._communicator, self._every_steps = observed.communicator, observed.config.run.audit_every_steps
        self._step, self._is_audited = plan.first_step, False
        self._batches: Iterator[Batch] = iter(())
        self._failure: DataError | None = None
        """Why the batch to recompute could not be read; start() raises it in place of the run's next batch."""
        self._single = MicrobatchDigests(parts.model, layers=())
        self._images: torch.Tensor | None = None
        """Digests of the images (B) of this rank's audited microbatch; None without one, or if it replaces an image."""

    def is_due(self, step: int) -> bool:
        """Return whether a step, counted from 0, is audited."""
        done, plan = step + 1, self._plan
        return done % self._every_steps == 0 or plan.is_checkpoint(done) or plan.is_evaluation(done)

    def extra_microbatches(self, step: int) -> Sequence[int]:
        """Return the microbatch that this rank recomputes in a step, to be read after its own; empty if none."""
        if not self.is_due(step):
            return ()
        choice = self._choose(step)
        return (choice.microbatches_P[choice.audited_by(self._communicator.rank)],)

    def _choose(self, step: int) -> AuditChoice:
        return choose_audit(self._plan, step=step, num_ranks=self._communicator.world_size)

    def start(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield this rank's own batches; register hooks for the audited microbatch of an audited step."""
        self._batches, plan = batches, self._plan
        rank = self._communicator.rank
        for step in range(plan.first_step, plan.num_steps):
            audited = self._choose(step).microbatches_P[rank] if self.is_due(step) else None
            for number in plan.microbatches:
                if self._failure:
                    raise self._failure
                batch = next(batches, None)
                if batch is None:
                    return
                self._single.stop()
                if number == audited:
                    self._images = None if batch.replaced else digests_of_images(batch)
                    self._single.microbatch = number
                    self._single.start()
                yield batch

    def close(self) -> None:
        """Remove the hooks."""
        self._single.stop()

    def before_step(self, step: int) -> None:
        self._step, self._images, self._is_audited = step, None, self.is_due(step)

    def before_update(self) -> None:
        """Audit the step, if it is due. Raises: ReplicasDiffer."""
        if self._is_audited:
            self._log("audit", self.check())

    def check(self) -> dict[str, Any]:
        """Compare the gradients of the audited step, between its sums and its update; return the log record.

        Collective. Waits for the device. Raises: ReplicasDiffer naming the device, on all ranks alike.
        """
        started = time.perf_counter()
        communicator, choice = self._communicator, self._choose(self._step)
        rank, num_ranks = communicator.rank, communicator.world_size
        rows = self._single.take()
        own = None if self._images is None else _digests_by_name(self._images.tolist(), rows)
        audited = choice.audited_by(rank)
        # rows is empty if this rank had no batch of its own: then no batch follows it
        again = self._compute(lambda: next(self._batches), choice.microbatches_P[audited]) if rows else None
        numbers_2P = torch.zeros(2 * num_ranks, dtype=torch.float64)
        numbers_2P[rank], numbers_2P[num_ranks + audited] = _number(own), _number(again)
        done = self._step + 1
        summed = communicator.sum_(numbers_2P.to(communicator.device), label=f"audit of step {done}").tolist()
        pairs = [(summed[each], summed[num_ranks + each]) for each in range(num_ranks)]
        if odd := [each for each, (one, other) in enumerate(pairs) if one and other and one != other]:
            raise self._name_faulty(odd, choice, own=own, again=again)
        compared = sum(bool(one and other) for one, other in pairs)
        return {"step": done, "compared": compared, "seconds": time.perf_counter() - started}

    def _compute(self, read: Callable[[], Batch], microbatch: int) -> NamedDigests | None:
        """Read and recompute a microbatch; return its digests, None if it cannot be read or replaces an image."""
        try:
            batch = read()
        except DataError as error:
            self._failure = error
            return None
        found = recompute(self._parts, self._plan, batch, step=self._step, microbatch=microbatch)
        return None if batch.replaced else _digests_by_name(*found)

    def _name_faulty(
        self, odd: Sequence[int], choice: AuditChoice, *, own: NamedDigests | None, again: NamedDigests | None
    ) -> ReplicasDiffer:
        """Let third ranks recompute these ranks' microbatches; return an error naming the wrong ones. Collective."""
        communicator = self._communicator
        rank = communicator.rank
        thirds = {}
        for each in odd:
            if choice.third_of(each) == rank:
                number = choice.microbatches_P[each]
                thirds[each] = self._compute(partial(self._read, self._step, number), number)
        mine = {
            "device": describe_device(communicator),
            "own": own if rank in odd else None,
            "again": again if choice.audited_by(rank) in odd else None,
            "thirds": thirds,
        }
        gathered_P = communicator.gather(mine)
        found = [blame(gathered_P, choice, each) for each in odd]
        sentences = dict(reversed(found))  # one for each set of ranks: the first
        return ReplicasDiffer(
            f"in step {self._step + 1} {'; '.join(reversed(sentences.values()))} (a bit has flipped, or that processor "
            "or its memory is faulty)"
        )


def blame(gathered_P: Sequence[Mapping[str, Any]], choice: AuditChoice, rank: int) -> tuple[frozenset[int], str]:
    """Return the ranks that may have computed the given rank's microbatch wrongly, and a sentence about them.

    gathered_P: from each rank its device and digests: own, again (as an auditor), thirds (as a third rank, by rank).
    """
    auditor, third, number = choice.auditor_of(rank), choice.third_of(rank), choice.microbatches_P[rank]
    one, other = gathered_P[rank]["own"], gathered_P[auditor]["again"]
    decisive = None if third is None else gathered_P[third]["thirds"].get(str(rank))
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    what = IMAGES if IMAGES in names else f"the gradient of {names[0]}"
    if what != IMAGES and names[1:]:
        what += f" and {len(names) - 1} more of {len(one) - 1} tensors"
    what += f" in microbatch {number}"
    device_of = [each["device"] for each in gathered_P]
    if rank == auditor:
        return frozenset([rank]), f"{device_of[rank]} computed other bits the second time: {what}"
    if third is None or decisive not in (one, other):
        return frozenset([rank, auditor]), (
            f"{device_of[rank]} and {device_of[auditor]} computed different bits, and no third rank tells which of "
            f"them is wrong: {what}"
        )
    wrong, right = (rank, auditor) if decisive == other else (auditor, rank)
    first, second = sorted((right, third))
    return frozenset([wrong]), f"{device_of[wrong]} computed other bits than ranks {first} and {second}: {what}"


def _digests_by_name(images: Sequence[int], rows: Sequence[Row]) -> NamedDigests:
    return {IMAGES: digest_in_order(images), **{name: found for phase, name, _, found in rows if phase == BEFORE_SUM}}


def _number(digests: NamedDigests | None) -> float:
    """Return one digest of all, above 0 and of about 48 bits, which fp64 holds exactly; 0 for None."""
    if digests is None:
        return 0.0
    text = json.dumps(digests, sort_keys=True)
    return float(1 + int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big"))
