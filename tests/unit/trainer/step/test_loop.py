"""One training step against plain PyTorch; reports, stops, evaluations and checkpoints in the right order."""

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from error_texts import naming
from small_run import ACCUMULATION, CLASSES, PLAN, SMOOTHING, SPAN, Recorder, Stop, make_batches, make_parts, train
from torch import nn
from torch._subclasses import FakeTensorMode
from torchvision.transforms.v2 import functional as vision

from bigbatch.errors import DataError, TrainingDiverged
from bigbatch.tools.doctor.profile import FindSyncs
from bigbatch.trainer.inference.accuracy import count_batch, evaluate
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.input.stream import InputStream
from bigbatch.trainer.models import build_model
from bigbatch.trainer.step.loop import TrainStep
from bigbatch.trainer.step.statistics import StepStatistics
from bigbatch.trainer.step.stop_request import Joining
from bigbatch.trainer.step.window import Totals


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
    train(PLAN, parts, recorder, iter(batches))
    expected, losses = plain_pytorch(batches)
    for name, parameter in expected.named_parameters():
        assert torch.allclose(parts.model.get_parameter(name).double(), parameter, rtol=1e-3, atol=2e-5), name
    assert [r["loss"] for r in recorder.records] == pytest.approx(losses, rel=1e-4)
    assert [r["lr"] for r in recorder.records] == pytest.approx([0.1 / (step + 1) for step in range(4)])


def test_train_waits_for_no_gpu_to_draw_a_batch() -> None:
    """Uses a flag with a device and no value, so that no GPU is needed. The input fails after the first batch."""

    def batches() -> Iterator[Batch]:
        yield make_batches()[0]
        raise DataError("gone")

    with FakeTensorMode():
        statistics = StepStatistics(torch.zeros(2, device="cuda"), microbatches=1)
    parts, stream = replace(make_parts(), statistics=statistics), InputStream(batches())
    with FindSyncs(torch.device("cuda")) as syncs:
        assert len(list(TrainStep(PLAN, parts).microbatches_of(0, stream))) == ACCUMULATION
    assert stream.failure
    assert not syncs.found


def test_train_order_of_reports_evaluations_and_checkpoints() -> None:
    recorder = Recorder()
    plan = replace(PLAN, log_every_steps=3, checkpoint_every_steps=3)
    totals = train(plan, make_parts(), recorder, iter(make_batches()))
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
    monkeypatch.setattr(parts.precision.weights, "are_apart", True)
    monkeypatch.setattr(parts.precision.weights, "publish_", lambda: on_their_way.__setitem__(0, True))
    monkeypatch.setattr(parts.precision.weights, "wait_for_weights", lambda: on_their_way.__setitem__(0, False))
    recorder = Recorder(lambda what: seen.append((what, on_their_way[0])))
    plan = replace(PLAN, log_every_steps=3, eval_every_steps=4, checkpoint_every_steps=3)
    train(plan, parts, recorder, iter(make_batches()), on_step=lambda done: recorder.called("step"))
    assert {what for what, _ in seen} == {"report", "evaluate", "save", "step"}
    assert {what for what, on_the_way in seen if on_the_way} == {"step"}


class Meter:
    """An energy meter that the test turns on."""

    def __init__(self) -> None:
        self.joules = 0.0

    def take_joules(self) -> float:
        taken, self.joules = self.joules, 0.0
        return taken


def test_train_energy_of_evaluations_and_checkpoints_is_of_no_step() -> None:
    """A step takes 10 J, an evaluation 1,000 and a checkpoint 100,000."""
    meter = Meter()
    joules = {"step": 10.0, "report": 0.0, "evaluate": 1e3, "save": 1e5}

    def use(what: str) -> None:
        meter.joules += joules[what]

    recorder = Recorder(use)
    parts = replace(make_parts(), take_joules=meter.take_joules)
    plan = replace(PLAN, checkpoint_every_steps=3)
    train(plan, parts, recorder, iter(make_batches()), on_step=lambda done: use("step"))
    assert [record["energy_joules"] for record in recorder.records] == [10, 10, 10, 10]


@pytest.mark.parametrize(
    ("every", "offset", "expected"), [(3, 0, [3, 4]), (2, 1, [1, 3, 4]), (3, 1, [1, 4]), (3, 2, [2, 4]), (4, 3, [3, 4])]
)
def test_plan_evaluates_from_its_offset_and_after_the_last_step(every: int, offset: int, expected: list[int]) -> None:
    plan = replace(PLAN, eval_every_steps=every, eval_offset_steps=offset)
    assert [done for done in range(5) if plan.is_evaluation(done)] == expected


@pytest.mark.parametrize("done", [1, 2])
def test_train_stops_after_the_step_under_way_whatever_is_due_then(done: int) -> None:
    """No report is due after the first step, and an evaluation after the second: it is left to the resumed run."""
    recorder = Recorder()
    plan = replace(PLAN, log_every_steps=100)
    totals = train(plan, make_parts(), recorder, iter(make_batches()), stop=Stop(at=done))
    assert (totals.stopped_by, totals.steps) == ("SIGINT", done)
    assert recorder.events == [("report", done), ("save", done, None)]


def test_train_reports_and_ends_at_a_boundary_at_which_a_rank_joins() -> None:
    """An evaluation is due, which is the next group's."""
    recorder, stop = Recorder(), Stop(at=1)
    stop.joining = Joining(since=0.0)
    plan = replace(PLAN, log_every_steps=100, eval_every_steps=1)
    with pytest.raises(Joining):
        train(plan, make_parts(), recorder, iter(make_batches()), stop=stop)
    assert recorder.events == [("report", 1)]


@pytest.mark.parametrize(("eval_every", "done"), [(2, 2), (4, 4)])
def test_train_stops_between_the_batches_of_an_evaluation(eval_every: int, done: int) -> None:
    """The last one's, too: what it would find is still owed."""
    stop = Stop(at=done + 3)

    def evaluate_slowly(what: str) -> None:
        for _ in range(9 if what == "evaluate" else 0):
            stop.leave_if_due()

    recorder = Recorder(evaluate_slowly)
    plan = replace(PLAN, log_every_steps=100, eval_every_steps=eval_every)
    totals = train(plan, make_parts(), recorder, iter(make_batches()), stop=stop)
    assert (totals.stopped_by, stop.num_passed) == ("SIGINT", done + 3)
    assert recorder.events == [("report", done), ("evaluate", done), ("save", done, None)]


@pytest.mark.parametrize("checkpoint_every", [1, 4])
@pytest.mark.parametrize("end", ["", "stop", "lost input"])
def test_train_waits_at_its_end_for_what_it_saves(end: str, checkpoint_every: int) -> None:
    """Also where the state after the last whole step is being written already."""

    def batches() -> Iterator[Batch]:
        yield from make_batches((2 if end == "lost input" else 4) * ACCUMULATION)
        raise DataError("gone")

    recorder = Recorder()
    plan = replace(PLAN, eval_every_steps=4, checkpoint_every_steps=checkpoint_every)
    with pytest.raises(DataError, match="gone") if end == "lost input" else nullcontext():
        train(plan, make_parts(), recorder, batches(), stop=Stop(at=2 if end == "stop" else 99))
    last = 2 if end else 4
    saved = [done for kind, done, *_ in recorder.events if kind == "save"]
    assert saved == sorted({*range(checkpoint_every, last, checkpoint_every), last})
    assert recorder.being_saved is None


def test_train_stop_at_the_last_step_changes_nothing() -> None:
    totals: Totals = train(PLAN, make_parts(), Recorder(), iter(make_batches()), stop=Stop(at=4))
    assert totals.stopped_by is None
    assert totals.steps == 4


def test_count_batch_by_hand() -> None:
    logits_BK = torch.tensor([[9.0, 1, 2, 3, 4, 5, 6], [0.0, 1, 2, 3, 4, 5, 6], [0.0, 1, 2, 3, 4, 5, 6]])
    labels_B = torch.tensor([0, 1, 2])
    counts = count_batch(logits_BK, labels_B, torch.tensor([True, True, True])).tolist()
    expected_loss = sum(float(logits_BK[i].double().logsumexp(0) - logits_BK[i, i]) for i in range(3))
    assert counts == pytest.approx([1, 2, expected_loss, 3])  # 0 first; 1 is sixth, 2 is fifth
    padded = count_batch(logits_BK, labels_B, torch.tensor([True, True, False])).tolist()
    assert padded[:2] == [1, 1]
    assert padded[3] == 2


@pytest.mark.parametrize(("odd", "hits"), [(torch.nan, 0), (torch.inf, 0), (-torch.inf, 1)])
def test_logits_that_are_no_answer_count_no_hit(odd: float, hits: int) -> None:
    """A model may exclude a class by minus infinity: the others keep their order."""
    logits_BK = torch.tensor([[odd, 1.0, 2.0], [odd, 1.0, 2.0], [0.0, 0.0, 1.0]])
    counts = count_batch(
        logits_BK, torch.tensor([0, 2, 2]), torch.tensor([True, True, True]), losses=lambda x, y: x[:, 1]
    )
    assert counts.tolist() == [1 + hits, 1 + 2 * hits, 2, 3]


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
    recorder = Recorder()
    recorder.reason = "good enough"
    totals = train(replace(PLAN, log_every_steps=9), make_parts(), recorder, iter(make_batches()), stop=Stop(at=3))
    assert recorder.events == [("report", 2), ("evaluate", 2), ("save", 2, 0.02)]
    assert totals.stopped_by is None, "it was finished"


def test_train_finds_the_first_step_without_a_number_between_reports() -> None:
    """In the third step of four; one report covers all."""
    prepare, calls = make_parts().prepare, iter(range(99))

    def broken(batch: Batch) -> Any:
        prepared = prepare(batch)
        bad = next(calls) == 2 * ACCUMULATION + 1
        return replace(prepared, images_BCHW=prepared.images_BCHW * float("nan")) if bad else prepared

    parts = replace(make_parts(), prepare=broken)
    plan = replace(PLAN, log_every_steps=4, eval_every_steps=4)
    with pytest.raises(TrainingDiverged, match=naming(" nan ", "step 3: ")):
        train(plan, parts, Recorder(), iter(make_batches()))
