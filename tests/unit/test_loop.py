"""One training step against plain PyTorch; reports, stops, evaluations and checkpoints in the right order."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from bigbatch.comm.connection import connect
from bigbatch.comm.environ import ProcessEnv
from bigbatch.comm.reducer import GradientReducer
from bigbatch.trainer.data.loader import Batch
from bigbatch.trainer.errors import DataError, TrainingDiverged
from bigbatch.trainer.evaluation import count_batch, evaluate
from bigbatch.trainer.loop import Hooks, Parts, Plan, Totals, train
from bigbatch.trainer.models import build_model
from bigbatch.trainer.models.norm import GhostBatchNorm2d, flatten_running_statistics
from bigbatch.trainer.precision import Precision

CPU = torch.device("cpu")
ALONE = ProcessEnv("none", 0, 1, 0, 1, "here", None)
SPAN, ACCUMULATION, CLASSES, SMOOTHING = 4, 3, 5, 0.1
PLAN = Plan(
    seed=0,
    first_step=0,
    num_steps=4,
    steps_per_epoch=2,
    accumulation_steps=ACCUMULATION,
    global_batch_size=SPAN * ACCUMULATION,
    ghosts_per_microbatch=1,
    label_smoothing=SMOOTHING,
    log_every_steps=1,
    eval_every_steps=2,
    checkpoint_every_steps=0,
)


def schedule(step: int) -> float:
    return 0.1 / (step + 1)


def make_parts(*, stop: Any = None) -> Parts:
    torch.manual_seed(0)
    communicator = connect(env=ALONE, backend="gloo", algorithm="ring")
    norm = partial(GhostBatchNorm2d, bn_span=SPAN, ghosts_per_step=ACCUMULATION)
    model = build_model("resnet9", num_classes=CLASSES, norm=norm, width=2)
    return Parts(
        model=model,
        statistics_N=flatten_running_statistics(model),
        precision=Precision(model, name="fp32", device=CPU),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, nesterov=True),
        schedule=schedule,
        reducer=GradientReducer(model.named_parameters(), communicator),
        communicator=communicator,
        normalize=lambda images_BCHW: images_BCHW.float() / 255,
        stop=stop or SimpleNamespace(is_set=False, signal_name=None),
    )


def make_batches(count: int = PLAN.num_steps * ACCUMULATION) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    return [
        Batch(
            torch.randint(0, 256, (SPAN, 3, 16, 16), dtype=torch.uint8, generator=generator),
            torch.randint(0, CLASSES, (SPAN,), generator=generator),
            torch.ones(SPAN, dtype=torch.bool),
        )
        for _ in range(count)
    ]


class Recorder:
    """Hooks that write down what happens."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.records: list[dict[str, Any]] = []

    def hooks(self) -> Hooks:
        return Hooks(on_report=self._report, evaluate=self._evaluate, save=self._save)

    def _report(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        self.events.append(("report", record["step"]))

    def _evaluate(self, done: int) -> dict[str, Any]:
        self.events.append(("evaluate", done))
        return {"top1": done / 100}

    def _save(self, done: int, top1: float | None) -> None:
        self.events.append(("save", done, top1))


def plain_pytorch(batches: list[Batch]) -> tuple[nn.Module, list[float]]:
    """The same run in float64 by the book: one forward per ghost batch, mean loss over the global batch."""
    parts = make_parts()
    model = build_model("resnet9", num_classes=CLASSES, norm=nn.BatchNorm2d, width=2)
    model.load_state_dict(copy.deepcopy(parts.model.state_dict()))
    model.double().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, nesterov=True)
    losses = []
    for step in range(PLAN.num_steps):
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        optimizer.zero_grad()
        all_losses = []
        for batch in batches[step * ACCUMULATION : (step + 1) * ACCUMULATION]:
            logits = model(batch.images_BCHW.double() / 255)
            all_losses.append(F.cross_entropy(logits, batch.labels_B, label_smoothing=SMOOTHING, reduction="none"))
        mean = torch.cat(all_losses).mean()
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
    return model, losses


def test_steps_equal_plain_pytorch() -> None:
    batches, parts, recorder = make_batches(), make_parts(), Recorder()
    train(PLAN, parts, recorder.hooks(), iter(batches))
    expected, losses = plain_pytorch(batches)
    for name, parameter in expected.named_parameters():
        assert torch.allclose(parts.model.get_parameter(name).double(), parameter, rtol=1e-3, atol=2e-5), name
    assert [r["loss"] for r in recorder.records] == pytest.approx(losses, rel=1e-4)
    assert [r["lr"] for r in recorder.records] == pytest.approx([0.1 / (step + 1) for step in range(4)])


def test_order_of_reports_evaluations_and_checkpoints() -> None:
    recorder = Recorder()
    plan = replace(PLAN, log_every_steps=3, checkpoint_every_steps=3)
    totals = train(plan, make_parts(), recorder.hooks(), iter(make_batches()))
    assert recorder.events == [
        *(("report", 2), ("evaluate", 2), ("save", 2, 0.02)),
        *(("report", 3), ("save", 3, None)),
        *(("report", 4), ("evaluate", 4), ("save", 4, 0.04)),
    ]
    assert totals.steps == 4
    assert totals.last_evaluation == {"top1": 0.04}


def test_last_step_is_evaluated_whatever_the_interval() -> None:
    recorder = Recorder()
    train(replace(PLAN, eval_every_steps=3), make_parts(), recorder.hooks(), iter(make_batches()))
    assert [event for event in recorder.events if event[0] == "evaluate"] == [("evaluate", 3), ("evaluate", 4)]


@pytest.mark.parametrize(("log_every", "saved"), [(1, ("save", 1, None)), (3, ("save", 2, 0.02))])
def test_stop_takes_effect_at_the_next_report(log_every: int, saved: tuple[Any, ...]) -> None:
    recorder, stop = Recorder(), SimpleNamespace(is_set=True, signal_name="SIGINT")
    plan = replace(PLAN, log_every_steps=log_every)
    totals = train(plan, make_parts(stop=stop), recorder.hooks(), iter(make_batches()))
    assert totals.stopped_by == "SIGINT"
    assert recorder.events[-1] == saved, "an evaluation that is due is still done, so that none is missing"


def test_stop_at_the_last_step_changes_nothing() -> None:
    stop = SimpleNamespace(is_set=False, signal_name=None)
    parts = make_parts(stop=stop)

    def batches() -> Iterator[Batch]:
        yield from make_batches()[: 3 * ACCUMULATION]
        stop.is_set = True
        yield from make_batches()[3 * ACCUMULATION :]

    totals: Totals = train(PLAN, parts, Recorder().hooks(), batches())
    assert totals.stopped_by is None
    assert totals.steps == 4


def test_shares_of_the_step_are_shares() -> None:
    recorder = Recorder()
    totals = train(PLAN, make_parts(), recorder.hooks(), iter(make_batches()))
    for record in recorder.records:
        assert 0 <= record["input_wait_fraction"] < 1
        assert 0 <= record["exposed_communication_fraction"] < 1
        assert record["images_per_second"] > 0
    assert 0 < totals.input_wait_seconds + totals.exposed_seconds < totals.step_seconds


def test_loss_that_is_no_number_ends_the_run() -> None:
    parts = make_parts()
    broken = replace(parts, normalize=lambda images_BCHW: images_BCHW.float() * float("nan"))
    with pytest.raises(TrainingDiverged, match=r"step 1.*schedule\.base_lr"):
        train(PLAN, broken, Recorder().hooks(), iter(make_batches()))


def test_counts_of_a_batch_by_hand() -> None:
    logits_BK = torch.tensor([[9.0, 1, 2, 3, 4, 5, 6], [0.0, 1, 2, 3, 4, 5, 6], [0.0, 1, 2, 3, 4, 5, 6]])
    labels_B = torch.tensor([0, 1, 2])
    counts = count_batch(logits_BK, labels_B, torch.tensor([True, True, True])).tolist()
    expected_loss = sum(float(logits_BK[i].double().logsumexp(0) - logits_BK[i, i]) for i in range(3))
    assert counts == pytest.approx([1, 2, expected_loss, 3])  # 0 first; 1 is sixth, 2 is fifth
    padded = count_batch(logits_BK, labels_B, torch.tensor([True, True, False])).tolist()
    assert padded[:2] == [1, 1]
    assert padded[3] == 2


def test_evaluation_that_misses_a_picture_is_an_error() -> None:
    parts = make_parts()
    with pytest.raises(DataError, match="counted 8 pictures of 9"):
        evaluate(
            parts.model,
            iter(make_batches(2)),
            normalize=parts.normalize,
            communicator=parts.communicator,
            num_samples=9,
        )
