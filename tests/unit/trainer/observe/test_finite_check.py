"""Which rank's gradients are not finite, and whether its device is the cause."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from small_run import ACCUMULATION, PLAN, make_batches, make_parts, observed, quickstart
from torch import Tensor

from bigbatch.errors import DataError, NotFinite, ReplicasDiffer
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.input.stream import InputStream
from bigbatch.trainer.observe import finite_check
from bigbatch.trainer.observe.finite_check import FiniteCheck
from bigbatch.trainer.step.loop import TrainStep


def judged(monkeypatch: pytest.MonkeyPatch, *, ranks: list[int], again: list[float], is_shared: bool = False) -> Any:
    """The error that rank 0 of three raises, which computes `again` where rank 1 or 2 computed NaN."""
    monkeypatch.setattr(finite_check, "describe_device", lambda communicator: "rank 0 on n0")
    monkeypatch.setattr(finite_check, "gradients_again", lambda *_, **__: [None, *map(torch.tensor, again)])
    places = [[f"rank {rank} on n{rank}", [4 + rank, "linear.weight"], 1 + rank] for rank in range(3)]
    gathers = iter([lambda value: places, lambda value: [value, [], []]])

    def read(step: int, microbatch: int) -> Batch:
        if not again:
            raise DataError("gone")
        return make_batches(1)[0]

    seen: Any = SimpleNamespace(
        communicator=SimpleNamespace(world_size=3, rank=0, gather=lambda value: next(gathers)(value)),
        plan=SimpleNamespace(division=SimpleNamespace(ranks_per_ghost=2 if is_shared else 1)),
        parts=None,
        read=read,
    )
    return FiniteCheck(seen, until=9)._judge(ranks, [])


def test_device_is_named_if_another_rank_computes_finite_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    error = judged(monkeypatch, ranks=[1, 2], again=[0.0, 1.0])
    assert isinstance(error, ReplicasDiffer)
    text = "in step 1 rank {0} on n{0} computed gradients that are not finite, linear.weight and {1} in microbatch {2}"
    assert str(error).startswith(text.format(1, "1 more tensor", 5))
    assert text.format(2, "2 more tensors", 6).removeprefix("in step 1 ") in str(error)
    assert str(error).count("of which rank 0 computed finite ones") == 2


@pytest.mark.parametrize(("again", "is_shared"), [([0.0, torch.nan], False), ([], False), ([0.0], True)])
def test_no_device_is_accused_if_another_rank_computes_the_same_or_none_can(
    again: list[float], is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = judged(monkeypatch, ranks=[1], again=again, is_shared=is_shared)
    assert isinstance(error, NotFinite)
    look = "and the device there" if is_shared else "there, of which another rank computes the same"
    assert f"step 1 are not finite on rank 1 of 3 alone: look at the images {look}, or lower" in str(error)


def test_steps_are_checked_up_to_the_one_that_failed_before() -> None:
    parts, said = make_parts(), list[str]()
    seen = observed(quickstart(), PLAN, parts, hint=lambda text, step: said.append(text))
    check = FiniteCheck(seen, until=2)
    train, stream = TrainStep(PLAN, parts), InputStream(check.start(iter(make_batches())))
    train.before_update = [check.before_update]
    calls = [0]

    def wrong(gradient: Tensor) -> Tensor:
        calls[0] += 1
        return gradient * torch.nan if calls[0] == ACCUMULATION + 2 else gradient

    next(p for p in parts.model.parameters() if p.requires_grad).register_hook(wrong)
    check.before_step(0)
    train(0, stream)
    check.before_step(1)
    with pytest.raises(NotFinite, match=naming("gradients of step 2 ", "any rank", "schedule.base_lr")) as caught:
        train(1, stream)
    assert caught.value.check_until == 2
    assert [number for (number, _), is_odd in check._is_odd.items() if is_odd] == [1]
    check.before_step(2)
    assert not check._hooks, "step 3 was not reached before"
    for step in (1, 2, 3):
        check.at_report({"step": step})
    assert [text.partition(" are")[0] for text in said] == ["all numbers up to step 2"]
