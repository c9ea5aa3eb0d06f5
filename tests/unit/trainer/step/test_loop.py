"""One training step against plain PyTorch; reports, stops, evaluations and checkpoints in the right order."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from error_texts import naming
from small_run import ACCUMULATION, CLASSES, CPU, PLAN, SMOOTHING, SPAN, Recorder, Stop, make_batches, make_parts
from torch import nn
from torch._subclasses import FakeTensorMode
from torchvision.transforms.v2 import functional as vision

from bigbatch.errors import DataError, TrainingDiverged
from bigbatch.trainer.doctor.syncs import FindSyncs
from bigbatch.trainer.inference.accuracy import count_batch, evaluate
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.input.prepare_batch import PrepareBatch
from bigbatch.trainer.input.stream import InputStream
from bigbatch.trainer.models import build_model
from bigbatch.trainer.step.loop import TrainStep, train
from bigbatch.trainer.step.plan import Hooks
from bigbatch.trainer.step.statistics import StepStatistics
from bigbatch.trainer.step.totals import Totals


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


def test_train_steps_equal_plain_pytorch() -> None:
    batches, parts, recorder = make_batches(), make_parts(), Recorder()
    train(PLAN, parts, recorder.hooks(), iter(batches))
    expected, losses = plain_pytorch(batches)
    for name, parameter in expected.named_parameters():
        assert torch.allclose(parts.model.get_parameter(name).double(), parameter, rtol=1e-3, atol=2e-5), name
    assert [r["loss"] for r in recorder.records] == pytest.approx(losses, rel=1e-4)
    assert [r["lr"] for r in recorder.records] == pytest.approx([0.1 / (step + 1) for step in range(4)])


def test_train_waits_for_no_gpu_to_draw_a_batch() -> None:
    """By a flag that has a device and no value, so that no GPU is needed."""
    with FakeTensorMode():
        statistics = StepStatistics(torch.zeros(3, device="cuda"))
    parts, stream = replace(make_parts(), statistics=statistics), InputStream(iter(make_batches()))
    with FindSyncs(torch.device("cuda")) as syncs:
        assert len(list(TrainStep(PLAN, parts).draw(0, stream))) == ACCUMULATION
    assert not syncs.found


def test_train_order_of_reports_evaluations_and_checkpoints() -> None:
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


def test_train_waits_for_all_weights_before_anything_but_the_next_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that still travel are read by the next forward alone, which waits for them itself."""
    parts, on_their_way = make_parts(), [False]
    seen: list[tuple[str, bool]] = []

    def note(*_: Any, what: str) -> dict[str, Any]:
        seen.append((what, on_their_way[0]))
        return {"top1": 0.5}

    monkeypatch.setattr(parts.precision.weights, "publish_", lambda: on_their_way.__setitem__(0, True))
    monkeypatch.setattr(parts.precision.weights, "settle", lambda: on_their_way.__setitem__(0, False))
    hooks = Hooks(**{what: partial(note, what=what) for what in ("on_report", "evaluate", "save", "before_step")})
    plan = replace(PLAN, log_every_steps=3, eval_every_steps=4, checkpoint_every_steps=3)
    train(plan, parts, hooks, iter(make_batches()))
    assert [on_the_way for what, on_the_way in seen if what == "before_step"] == [False, True, True, False]
    assert {what for what, _ in seen} == {"on_report", "evaluate", "save", "before_step"}
    assert not any(on_the_way for what, on_the_way in seen if what != "before_step")


class Meter:
    """An energy meter that hooks turn on."""

    def __init__(self) -> None:
        self.joules = 0.0

    def take_joules(self) -> float:
        taken, self.joules = self.joules, 0.0
        return taken


def test_train_energy_of_evaluations_and_checkpoints_is_of_no_step() -> None:
    """A step takes 10 J, an evaluation 1,000 and a checkpoint 100,000."""
    meter, recorder = Meter(), Recorder()

    def use(*_: Any, joules: float) -> dict[str, Any]:
        meter.joules += joules
        return {"top1": 0.5}

    hooks = Hooks(
        on_report=recorder.records.append,
        evaluate=partial(use, joules=1e3),
        save=partial(use, joules=1e5),
        before_step=partial(use, joules=10.0),
    )
    parts = replace(make_parts(), energy=meter)
    train(replace(PLAN, checkpoint_every_steps=3), parts, hooks, iter(make_batches()))
    assert [record["energy_joules"] for record in recorder.records] == [10, 10, 10, 10]


@pytest.mark.slow
def test_train_evaluates_the_last_step_whatever_the_interval() -> None:
    recorder = Recorder()
    train(replace(PLAN, eval_every_steps=3), make_parts(), recorder.hooks(), iter(make_batches()))
    assert [event for event in recorder.events if event[0] == "evaluate"] == [("evaluate", 3), ("evaluate", 4)]


@pytest.mark.parametrize(
    ("every", "offset", "expected"), [(2, 1, [1, 3, 4]), (3, 1, [1, 4]), (3, 2, [2, 4]), (4, 3, [3, 4])]
)
def test_train_evaluations_begin_at_their_offset(every: int, offset: int, expected: list[int]) -> None:
    recorder = Recorder()
    plan = replace(PLAN, eval_every_steps=every, eval_offset_steps=offset)
    train(plan, make_parts(), recorder.hooks(), iter(make_batches()))
    assert [event[1] for event in recorder.events if event[0] == "evaluate"] == expected


@pytest.mark.parametrize("done", [1, 2])
def test_train_stops_after_the_step_under_way_whatever_is_due_then(done: int) -> None:
    """No report is due after the first step, and an evaluation after the second: it is left to the resumed run."""
    recorder = Recorder()
    plan = replace(PLAN, log_every_steps=100)
    totals = train(plan, make_parts(stop=Stop(at=done)), recorder.hooks(), iter(make_batches()))
    assert (totals.stopped_by, totals.steps, totals.saved_step) == ("SIGINT", done, done)
    assert recorder.events == [("report", done), ("save", done, None)]


@pytest.mark.parametrize(("eval_every", "done"), [(2, 2), (4, 4)])
def test_train_stops_between_the_batches_of_an_evaluation(eval_every: int, done: int) -> None:
    """The last one's, too: what it would find is still owed."""
    recorder, stop = Recorder(), Stop(at=done + 3)

    def evaluate_slowly(done: int) -> dict[str, Any]:
        recorder.events.append(("evaluate", done))
        for _ in range(9):
            stop.leave_if_due()
        raise AssertionError("was not stopped")

    hooks = replace(recorder.hooks(), evaluate=evaluate_slowly)
    plan = replace(PLAN, log_every_steps=100, eval_every_steps=eval_every)
    totals = train(plan, make_parts(stop=stop), hooks, iter(make_batches()))
    assert (totals.stopped_by, stop.num_passed) == ("SIGINT", done + 3)
    assert recorder.events == [("report", done), ("evaluate", done), ("save", done, None)]


@pytest.mark.parametrize("stop_at", [99, 3], ids=["end", "stop"])
def test_train_waits_at_its_end_for_what_it_saves(stop_at: int) -> None:
    recorder, events = Recorder(), list[str]()
    hooks = replace(
        recorder.hooks(),
        save=lambda done, top1: events.append(f"save {done}"),
        settle=lambda: events.append("settle"),
    )
    plan = replace(PLAN, eval_every_steps=4, checkpoint_every_steps=1)
    train(plan, make_parts(stop=Stop(at=stop_at)), hooks, iter(make_batches()))
    last = min(stop_at, PLAN.num_steps)
    assert events == [*(f"save {done}" for done in range(1, last + 1)), "settle"]


def test_train_without_input_waits_for_what_it_saves() -> None:
    """Also where the state after the last whole step is being written already."""

    def batches() -> Iterator[Batch]:
        yield from make_batches(2 * ACCUMULATION)
        raise DataError("gone")

    for every, saved in ((2, []), (4, ["save 2"])):
        events: list[str] = []
        hooks = replace(
            Recorder().hooks(),
            save=lambda done, top1, events=events: events.append(f"save {done}"),
            settle=lambda events=events: events.append("settle"),
        )
        with pytest.raises(DataError, match="gone"):
            train(replace(PLAN, eval_every_steps=4, checkpoint_every_steps=every), make_parts(), hooks, batches())
        assert events == [*(["save 2"] if every == 2 else []), *saved, "settle"]


def test_train_stop_at_the_last_step_changes_nothing() -> None:
    totals: Totals = train(PLAN, make_parts(stop=Stop(at=4)), Recorder().hooks(), iter(make_batches()))
    assert totals.stopped_by is None
    assert totals.steps == 4


def test_train_shares_of_the_step_are_shares() -> None:
    recorder = Recorder()
    totals = train(PLAN, make_parts(), recorder.hooks(), iter(make_batches()))
    for record in recorder.records:
        assert 0 <= record["input_wait_fraction"] < 1
        assert 0 <= record["exposed_communication_fraction"] < 1
        assert record["images_per_second"] > 0
    assert 0 < totals.input_wait_seconds + totals.exposed_seconds < totals.step_seconds


def test_train_ends_with_a_loss_that_is_no_number() -> None:
    parts = make_parts()
    prepare = PrepareBatch(normalize=lambda images_BCHW: images_BCHW.float() * float("nan"), device=CPU)
    broken = replace(parts, prepare=prepare)
    with pytest.raises(TrainingDiverged, match=naming(" nan ", "step 1:", "schedule.base_lr")):
        train(PLAN, broken, Recorder().hooks(), iter(make_batches()))


def test_count_batch_by_hand() -> None:
    logits_BK = torch.tensor([[9.0, 1, 2, 3, 4, 5, 6], [0.0, 1, 2, 3, 4, 5, 6], [0.0, 1, 2, 3, 4, 5, 6]])
    labels_B = torch.tensor([0, 1, 2])
    counts = count_batch(logits_BK, labels_B, torch.tensor([True, True, True])).tolist()
    expected_loss = sum(float(logits_BK[i].double().logsumexp(0) - logits_BK[i, i]) for i in range(3))
    assert counts == pytest.approx([1, 2, expected_loss, 3])  # 0 first; 1 is sixth, 2 is fifth
    padded = count_batch(logits_BK, labels_B, torch.tensor([True, True, False])).tolist()
    assert padded[:2] == [1, 1]
    assert padded[3] == 2


def test_evaluate_that_misses_an_image_is_an_error() -> None:
    parts = make_parts()
    with pytest.raises(DataError, match=naming(" 8 ", " 9;")):
        evaluate(
            parts.model,
            iter(make_batches(2)),
            normalize=parts.normalize,
            communicator=parts.communicator,
            num_samples=9,
        )


def evaluate_8(**options: Any) -> tuple[nn.Module, dict[str, Any]]:
    """The model, and the record of its evaluation over two batches."""
    parts = make_parts()
    with torch.no_grad():
        for weight in parts.model.parameters():
            weight.mul_(3)  # or the outputs hardly depend on the image yet
    record = evaluate(
        parts.model,
        iter(make_batches(2)),
        normalize=parts.normalize,
        communicator=parts.communicator,
        num_samples=2 * SPAN,
        **options,
    )
    return parts.model, record


def expected_loss(model: nn.Module, *, with_mirrored: bool) -> float:
    """Mean cross-entropy of the mean logits, in float64, one image at a time."""
    model = copy.deepcopy(model).double().eval()
    losses = []
    for batch in make_batches(2):
        for image_CHW, label in zip(batch.images_BCHW, batch.labels_B, strict=True):
            views = [image_CHW, vision.horizontal_flip(image_CHW)] if with_mirrored else [image_CHW]
            with torch.no_grad():
                logits_VK = torch.cat([model(view[None].double() / 255) for view in views])
            losses.append(F.cross_entropy(logits_VK.mean(0), label).item())
    return sum(losses) / len(losses)


@pytest.mark.parametrize(("options", "with_mirrored"), [({}, False), ({"flip": False}, False), ({"flip": True}, True)])
def test_evaluate_with_flip_takes_the_mean_over_the_image_and_its_mirror_image(
    options: dict[str, bool], with_mirrored: bool
) -> None:
    model, record = evaluate_8(**options)
    assert record["count"] == 2 * SPAN
    assert record["loss"] == pytest.approx(expected_loss(model, with_mirrored=with_mirrored), rel=1e-5)
    other = expected_loss(model, with_mirrored=not with_mirrored)
    assert record["loss"] != pytest.approx(other, rel=1e-3), "the views do not differ: nothing was tested"


def test_train_saves_the_evaluation_that_ends_it_and_it_is_the_last() -> None:
    recorder, stop = Recorder(), Stop(at=3)
    hooks = replace(recorder.hooks(), reason_to_end=lambda: "good enough")
    totals = train(replace(PLAN, log_every_steps=9), make_parts(stop=stop), hooks, iter(make_batches()))
    assert recorder.events == [("report", 2), ("evaluate", 2), ("save", 2, 0.02)]
    assert totals.stopped_by is None, "it was finished"


def test_train_finds_the_first_step_without_a_number_between_reports() -> None:
    """The images of the third step of four are none, of which one report tells."""
    prepare, calls = make_parts().prepare, iter(range(99))

    def broken(batch: Batch) -> Any:
        prepared = prepare(batch)
        bad = next(calls) == 2 * ACCUMULATION + 1
        return replace(prepared, images_BCHW=prepared.images_BCHW * float("nan")) if bad else prepared

    parts = replace(make_parts(), prepare=broken)
    plan = replace(PLAN, log_every_steps=4, eval_every_steps=4)
    with pytest.raises(TrainingDiverged, match=naming(" nan ", "step 3: ")):
        train(plan, parts, Recorder().hooks(), iter(make_batches()))
