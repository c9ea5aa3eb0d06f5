"""Find the rank whose gradients are not finite, in a run that went back because numbers were not finite."""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import gpu_uuid
from bigbatch.errors import DataError, NotFinite, ReplicasDiffer
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.observe.observer import Observed, Observer
from bigbatch.trainer.step.divergence import REMEDY
from bigbatch.trainer.step.loop import seed_forward
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.words import count, name_ranks


class FiniteCheck(Observer):
    """Checks each rank's gradients before their sum, in all steps up to that after which the run was not finite.

    If those of some ranks are not finite, other ranks compute the same microbatches again with the same weights: if
    their gradients are finite, the device is wrong, else the images or the learning rate. Waits for the device in each
    of these steps; later ones are not checked.
    """

    def __init__(self, observed: Observed, *, until: int) -> None:
        self._observed, self._plan, self._parts, self._until = observed, observed.plan, observed.parts, until
        self._step = self._microbatch = 0
        self._is_shared = observed.plan.division.ranks_per_ghost > 1
        """Whether a forward is collective, so that no rank alone can compute it again."""
        self._is_odd: dict[tuple[int, str], Tensor] = {}
        """(number of a microbatch, parameter) -> whether its gradient is not finite."""
        self._hooks: list[RemovableHandle] = []

    def start(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches unchanged, and note which microbatch each is."""
        numbers = self._plan.microbatches
        for index, batch in enumerate(batches):
            self._microbatch = numbers[index % len(numbers)]
            yield batch

    def before_step(self, step: int) -> None:
        self._step, self._is_odd = step, {}
        if step < self._until:
            named = self._parts.model.named_parameters()
            self._hooks = [p.register_hook(partial(self._look, name)) for name, p in named if p.requires_grad]

    def _look(self, name: str, gradient: Tensor) -> None:
        self._is_odd[self._microbatch, name] = ~gradient.isfinite().all()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def before_update(self) -> None:
        """Check the step. Raises: ReplicasDiffer naming the device; NotFinite if no device alone is wrong."""
        if not self._hooks:
            return
        self.close()
        communicator, step = self._observed.communicator, self._step + 1
        odd = [place for place, is_odd in self._is_odd.items() if is_odd]  # waits for the device
        odd_P = torch.zeros(communicator.world_size, dtype=torch.float64, device=communicator.device)
        odd_P[communicator.rank] = len(odd)
        odd_P = communicator.sum_(odd_P, label=f"check of the gradients of step {step}").cpu()
        ranks = [rank for rank, number in enumerate(odd_P.tolist()) if number]
        if len(ranks) == communicator.world_size:
            raise self._marked(NotFinite(f"the gradients of step {step} are not finite on any rank: {REMEDY}"))
        if ranks:
            raise self._marked(self._judge(ranks, odd))

    def _marked(self, error: NotFinite | ReplicasDiffer) -> NotFinite | ReplicasDiffer:
        error.check_until = self._until
        return error

    def _judge(self, ranks: list[int], odd: list[tuple[int, str]]) -> NotFinite | ReplicasDiffer:
        """Let other ranks compute the first microbatch of each of these ranks that is not finite. Collective."""
        communicator, step = self._observed.communicator, self._step + 1
        found_P = communicator.gather([describe_device(communicator), odd[0] if odd else None, len(odd)])
        others = [rank for rank in range(communicator.world_size) if rank not in ranks]
        judge_of = {rank: others[index % len(others)] for index, rank in enumerate(ranks)}
        own = [rank for rank, judge in judge_of.items() if judge == communicator.rank and not self._is_shared]
        judged_P = communicator.gather([rank for rank in own if self._is_finite_again(found_P[rank][1][0])])
        wrong = [rank for rank in ranks if rank in judged_P[judge_of[rank]]]
        if not wrong:
            look = "there, of which another rank computes the same"
            if self._is_shared:
                look = "and the device there"
            return NotFinite(
                f"the gradients of step {step} are not finite on {name_ranks(ranks)} of {communicator.world_size} "
                f"alone: look at the images {look}, or {REMEDY}"
            )
        sentences = []
        for rank in wrong:
            device, (microbatch, name), number = found_P[rank]
            more = f" and {count(number - 1, 'more tensor')}" if number > 1 else ""
            sentences.append(
                f"{device} computed gradients that are not finite, {name}{more} in microbatch {microbatch}, of which "
                f"rank {judge_of[rank]} computed finite ones"
            )
        return ReplicasDiffer(f"in step {step} {'; '.join(sentences)} (that processor or its memory is faulty)")

    def _is_finite_again(self, microbatch: int) -> bool:
        assert self._observed.read is not None
        try:
            batch = self._observed.read(self._step, microbatch)
        except DataError:
            return False
        again = gradients_again(self._parts, self._plan, batch, step=self._step, microbatch=microbatch)
        return all(bool(gradient.isfinite().all()) for gradient in again if gradient is not None)

    def at_report(self, record: dict[str, object]) -> None:
        """Say so, if all steps were finite this time."""
        if record["step"] == self._until:
            self._observed.hint(
                f"all numbers up to step {self._until} are finite this time: a device computed wrongly once, or the "
                "learning rate is near its limit",
                step=self._until,
            )


def gradients_again(parts: Parts, plan: Plan, batch: Batch, *, step: int, microbatch: int) -> Sequence[Tensor | None]:
    """Return a microbatch's gradients with the current weights, before any sum; see recompute() of audits."""
    prepared = parts.prepare(batch)
    sums_N = parts.statistics.to_sum_N.clone()
    seed_forward(plan.seed, step=step, ghost=microbatch * plan.ghosts_per_microbatch)
    with parts.precision.forward():
        logits_BK = parts.model(prepared.images_BCHW).float()
    loss = parts.precision.scaled(parts.loss(logits_BK, prepared.targets) / plan.global_batch_size)
    # hooks of tensors get the gradients; parameters and reducer do not
    trained = [p for p in parts.model.parameters() if p.requires_grad]
    gradients: Sequence[Tensor | None] = torch.autograd.grad(loss, trained, allow_unused=True)
    parts.statistics.to_sum_N.copy_(sums_N)
    seed_forward(plan.seed, step=step, ghost=plan.global_batch_size)
    return gradients


def describe_device(communicator: Communicator) -> str:
    """Return this rank, its host and its GPU, such as: rank 1 on n0 (cuda:0, GPU-...)."""
    rank, uuid = communicator.rank, gpu_uuid(communicator.device)
    host = communicator.connection.control.host_of(rank)
    gpu = ", ".join(filter(None, (str(communicator.device), uuid)))
    return f"rank {rank} on {host}" + (f" ({gpu})" if communicator.device.type == "cuda" else "")
