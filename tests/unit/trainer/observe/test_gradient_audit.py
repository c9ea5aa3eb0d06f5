"""Gradient audits: what is chosen, which rank is named, and that recomputing a microbatch changes nothing."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from small_run import ACCUMULATION, PLAN, make_batches, make_parts, observed, quickstart
from torch import Tensor

from bigbatch.errors import DataError, ReplicasDiffer
from bigbatch.trainer.input.base import BadImage, Batch
from bigbatch.trainer.input.stream import InputStream
from bigbatch.trainer.observe.digests import BEFORE_SUM, MicrobatchDigests, digests_of_images
from bigbatch.trainer.observe.gradient_audit import AuditChoice, GradientAudit, blame, choose_audit, recompute
from bigbatch.trainer.step.loop import TrainStep
from bigbatch.trainer.step.plan import Parts


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_choice_gives_each_ranks_microbatch_to_another_rank_and_a_third(num_ranks: int) -> None:
    seen = set()
    for step in range(60):
        choice = choose_audit(PLAN, step=step, num_ranks=num_ranks)
        assert choice == choose_audit(PLAN, step=step, num_ranks=num_ranks)
        for rank, number in enumerate(choice.microbatches_P):
            auditor, third = choice.auditor_of(rank), choice.third_of(rank)
            assert number // ACCUMULATION == rank
            assert choice.audited_by(auditor) == rank
            assert (auditor == rank) == (num_ranks == 1)
            assert (third is None) == (num_ranks < 3)
            assert third not in (rank, auditor)
            seen.add((rank, auditor, number % ACCUMULATION))
    assert len(seen) == num_ranks * max(1, num_ranks - 1) * ACCUMULATION, "each pair and each microbatch"
    other = replace(PLAN, seed=1)
    assert any(choose_audit(other, step=k, num_ranks=6) != choose_audit(PLAN, step=k, num_ranks=6) for k in range(5))


GOOD, BAD = {"images": "a", "conv": "b", "fc": "c"}, {"images": "a", "conv": "x", "fc": "y"}


@pytest.mark.parametrize(
    ("own", "again", "third", "accused", "text"),
    [
        (BAD, GOOD, GOOD, {1}, "one computed other bits than ranks 0 and 2: the gradient of conv and 1 more of 2 "),
        (GOOD, {**GOOD, "fc": "z"}, BAD, {1, 2}, "one and two computed different bits, and no third rank"),
        (
            GOOD,
            {"images": "q", "conv": "x", "fc": "y"},
            GOOD,
            {2},
            "two computed other bits than ranks 0 and 1: images ",
        ),
    ],
)
def test_blame_is_the_majoritys(
    own: dict[str, str], again: dict[str, str], third: dict[str, str] | None, accused: set[int], text: str
) -> None:
    told = [{"device": name, "own": None, "again": None, "thirds": {}} for name in ("zero", "one", "two")]
    told[1]["own"], told[2]["again"] = own, again
    told[0]["thirds"] = {"1": third}
    found, sentence = blame(told, AuditChoice((0, 5, 9), shift=2), 1)
    assert found == accused
    assert sentence.startswith(text)
    assert sentence.endswith(" in microbatch 5")


def test_blame_without_a_third_rank_names_both_and_alone_the_device() -> None:
    told = [{"device": name, "own": GOOD, "again": BAD, "thirds": {}} for name in ("zero", "one")]
    assert blame(told, AuditChoice((0, 3), shift=1), 1)[0] == {0, 1}
    assert blame(told[:1], AuditChoice((2,), shift=0), 0)[1] == (
        "zero computed other bits the second time: the gradient of conv and 1 more of 2 tensors in microbatch 2"
    )


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_microbatch_computed_again_has_the_bits_of_the_step_and_leaves_all_as_it_was(precision: str) -> None:
    parts, batches = make_parts(precision=precision), make_batches(ACCUMULATION)
    step = TrainStep(PLAN, parts)
    of_step = MicrobatchDigests(parts.model, layers=())

    def told() -> Iterator[Batch]:
        for number, batch in enumerate(batches):
            of_step.microbatch = number
            yield batch

    def before_update() -> None:
        of_step.stop()
        expected = of_step.take()
        tensors = [*parts.model.state_dict().values(), parts.statistics.to_sum_N]
        tensors += [p.grad for p in parts.model.parameters() if p.grad is not None]
        before, rng = [tensor.clone() for tensor in tensors], torch.random.get_rng_state()
        for number, batch in enumerate(batches):
            images, rows = recompute(parts, PLAN, batch, step=0, microbatch=number)
            assert images == digests_of_images(batch).tolist()
            assert {row[:3]: row[3] for row in rows} == {r[:3]: r[3] for r in expected if r[2] == number}
            assert {phase for phase, *_ in rows} == {BEFORE_SUM}
        assert torch.equal(torch.random.get_rng_state(), rng)
        for tensor, was in zip(tensors, before, strict=True):
            assert torch.equal(tensor, was)
        checked.append(len(expected))

    checked: list[int] = []
    step.before_update = [before_update]
    of_step.start()
    step(0, InputStream(told()))
    assert checked == [ACCUMULATION * sum(1 for _ in parts.model.parameters())]
    parts.close()


class Alone:
    """Four steps of a run of one rank; each even one is audited."""

    def __init__(self, parts: Parts, *, change: Callable[[list[Batch]], list[Batch]] = lambda batches: batches) -> None:
        self.records = list[dict[str, object]]()
        config = quickstart("--run.audit_every_steps=2", "--run.reproducible=true")
        read, log = (lambda step, number: self.batches[number]), (lambda kind, record: self.records.append(record))
        self.audit = GradientAudit(observed(config, PLAN, parts, read=read, log=log))
        self.step = TrainStep(PLAN, parts)
        self.step.before_update = [self.audit.before_update]
        self.batches = change(self.in_order(make_batches()))

    def in_order(self, batches: list[Batch]) -> list[Batch]:
        """Return the batches in the loader's order: the recomputed one follows those of its step."""
        found = []
        for step in range(PLAN.num_steps):
            own = batches[step * ACCUMULATION : (step + 1) * ACCUMULATION]
            found += [*own, *(own[number] for number in self.audit.extra_microbatches(step))]
        return found

    def run(self, source: Iterator[Batch] | None = None) -> InputStream:
        stream = InputStream(self.audit.start(source or iter(self.batches)))
        for step in range(PLAN.num_steps):
            self.audit.before_step(step)
            self.step(step, stream)
        return stream


def test_single_flip_is_found_by_one_rank_alone() -> None:
    parts = make_parts()
    calls = 0

    def flip(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        flipped = gradient.clone()
        flipped.view(torch.int32).view(-1)[0] ^= calls == 2 * ACCUMULATION + 1  # what is computed again in step 2
        return flipped

    parts.model.linear.weight.register_hook(flip)
    with pytest.raises(ReplicasDiffer, match=r"^in step 2 rank 0 on \S+ computed other bits the second time: the grad"):
        Alone(parts).run()
    parts.close()


def test_images_with_a_stand_in_and_images_that_fail_are_not_compared() -> None:
    parts = make_parts()

    def replace_one(batches: list[Batch]) -> list[Batch]:
        last = PLAN.num_steps * ACCUMULATION + 1  # the last of step 4 that is computed again
        return [*batches[:last], replace(batches[last], replaced=(BadImage(3, "torn"),))]

    alone = Alone(parts, change=replace_one)
    alone.run()
    assert [record["compared"] for record in alone.records] == [1, 0]
    alone.records.clear()

    def failing() -> Iterator[Batch]:
        yield from alone.batches[:ACCUMULATION]
        yield from alone.batches[ACCUMULATION : 2 * ACCUMULATION]
        raise DataError("gone")

    stream = alone.run(failing())
    assert [record["compared"] for record in alone.records] == [0, 0]
    assert stream.failure is not None
    assert (stream.failure.step, stream.failure.reason) == (2, "gone")
    parts.close()
