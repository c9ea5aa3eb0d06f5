"""Input that fails ends a run with a checkpoint of the last whole step, in which no bit is another one."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from error_texts import naming
from small_run import ACCUMULATION, OPTIMIZERS, PLAN, SPAN, Recorder, Stop, make_batches, make_parts, train

from bigbatch.errors import DataError
from bigbatch.trainer.inference.accuracy import evaluate
from bigbatch.trainer.input.base import BadImage, Batch
from bigbatch.trainer.input.stream import InputFailure, InputStream
from bigbatch.trainer.step.plan import Parts, Plan
from bigbatch.trainer.step.precision import COMPUTE_DTYPES

STEPS = replace(PLAN, eval_every_steps=PLAN.num_steps)
"""Evaluated and saved at the end alone."""
LOST = "/data/7.JPEG: cannot be read (Stale file handle)"


def failing(batches: list[Batch]) -> Iterator[Batch]:
    yield from batches
    raise DataError(LOST)


def with_bad(batch: Batch, *positions: int) -> Batch:
    return replace(batch, replaced=tuple(BadImage(n, f"{n}.JPEG: is not an image") for n in positions))


def bits(value: Any) -> Any:
    """Tensors as bytes, so that == compares bits; 0 and -0 are two values."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(inner) for key, inner in value.items()}
    return [bits(inner) for inner in value] if isinstance(value, list) else value


class StateRecorder(Recorder):
    """Also keeps the whole state of each save."""

    def __init__(self, parts: Parts) -> None:
        super().__init__()
        self.parts = parts
        self.states: dict[int, Any] = {}

    def start(self, *, done: int, top1: float | None, **_: object) -> None:
        super().start(done=done, top1=top1)
        precision = self.parts.precision
        state = [precision.model_state(), precision.state_dict(), self.parts.optimizer.state_dict()]
        self.states[done] = bits([*state, self.parts.statistics.running_N, self.parts.reducer.order])


def run(plan: Plan, batches: Iterator[Batch], *, precision: str, optimizer: str) -> tuple[StateRecorder, str]:
    """What was recorded, and the message with which the run ended."""
    parts = make_parts(precision=precision, optimizer=optimizer)
    recorder, message = StateRecorder(parts), ""
    try:
        train(plan, parts, recorder, batches)
    except DataError as error:
        message = str(error)
    return recorder, message


@cache
def undisturbed(precision: str, optimizer: str) -> dict[int, Any]:
    """The state after each step."""
    plan = replace(STEPS, checkpoint_every_steps=1)
    recorder, message = run(plan, iter(make_batches()), precision=precision, optimizer=optimizer)
    assert not message
    return recorder.states


CASES = [(1, 1, 3), (3, 2, 1), (1, 0, 1), (3, 0, 3)]


@pytest.mark.parametrize(
    ("precision", "optimizer", "step", "microbatch", "log_every"),
    [
        *((precision, "lars outside", *CASES[1]) for precision in COMPUTE_DTYPES),
        *(("fp16", optimizer, *CASES[1]) for optimizer in OPTIMIZERS if optimizer != "lars outside"),
        *(("fp32", "sgd", *case) for case in CASES),
    ],
)
def test_stream_state_before_the_failed_step_is_saved_bit_for_bit(
    precision: str, optimizer: str, step: int, microbatch: int, log_every: int
) -> None:
    batches = failing(make_batches(step * ACCUMULATION + microbatch))
    plan = replace(STEPS, log_every_steps=log_every)
    recorder, message = run(plan, batches, precision=precision, optimizer=optimizer)
    assert re.search(naming(LOST, f"step {step}."), message)
    reports = [("report", done) for done in range(1, step + 1) if done % log_every == 0]
    assert recorder.events == [*reports, ("save", step, None)]
    expected = undisturbed(precision, optimizer)
    assert recorder.states[step] == expected[step]
    assert recorder.states[step] != expected[step + 1], "the comparison sees the difference of a step"


@pytest.mark.parametrize(
    ("first_step", "num_batches", "told"), [(0, 0, None), (0, 1, "No step "), (2, 0, None), (2, 1, " step 2.")]
)
def test_stream_failure_before_the_end_of_the_first_step_saves_nothing(
    first_step: int, num_batches: int, told: str | None
) -> None:
    batches = failing(make_batches(num_batches))
    plan = replace(STEPS, first_step=first_step)
    recorder, said = run(plan, batches, precision="fp16", optimizer="sgd")
    assert said == LOST if told is None else re.search(naming(LOST, told), said)
    assert recorder.events == []


def test_stream_evaluated_checkpoint_of_the_step_is_left_as_it_is() -> None:
    plan = replace(STEPS, eval_every_steps=2)
    recorder, _ = run(plan, failing(make_batches(2 * ACCUMULATION)), precision="fp32", optimizer="sgd")
    assert recorder.events[-2:] == [("evaluate", 2), ("save", 2, 0.02)]


def test_stream_failure_and_stop_signal_at_once_end_with_the_failure() -> None:
    recorder = Recorder()
    plan, batches = replace(STEPS, log_every_steps=2), failing(make_batches(ACCUMULATION))
    with pytest.raises(DataError, match=naming(LOST, "step 1.")):
        train(plan, make_parts(), recorder, batches, stop=Stop(at=2))
    assert recorder.events == [("save", 1, None)]


def test_stream_skipped_images_are_told_at_the_report() -> None:
    batches = make_batches()
    batches[0], batches[1] = with_bad(batches[0], 3), with_bad(batches[1], 3, 12)
    batches[ACCUMULATION] = with_bad(batches[ACCUMULATION], 3)
    recorder, _ = run(STEPS, iter(batches), precision="fp32", optimizer="sgd")
    told = [(done, sorted(event[0])) for kind, done, *event in recorder.events if kind == "skipped"]
    assert told == [(1, ["train/12", "train/3"])], "each once"


def test_stream_too_many_skipped_images_before_a_failure_save_once() -> None:
    recorder, batches = Recorder(), make_batches(ACCUMULATION)
    batches[0] = with_bad(batches[0], 3, 12)
    with pytest.raises(DataError, match="2 images are bad"):
        train(replace(STEPS, log_every_steps=2), make_parts(), recorder, failing(batches), max_skipped=1)
    assert [event[:2] for event in recorder.events] == [("skipped", 1), ("save", 1)]


def test_stream_last_batch_comes_again_after_a_failure() -> None:
    first, second = make_batches(2)
    stream = InputStream(failing([first, second]))
    drawn = [stream.draw(step=step) for step in (0, 1, 2, 3)]
    assert stream.take_wait_seconds() > 0
    assert stream.take_wait_seconds() == 0
    assert [batch is wanted for batch, wanted in zip(drawn, (first, second, second, second), strict=True)] == [True] * 4
    assert stream.failure == InputFailure(2, LOST)


class OtherRank:
    """A communicator of two ranks; the other one has had what exchanges gives, as Python objects, in turn."""

    def __init__(self, exchanges: list[Any], *, failed: float = 0.0) -> None:
        self.parts, self.connection = make_parts(), self
        self.exchanges, self.failed, self.sent = exchanges, failed, list[Any]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.parts.communicator, name)

    def gather(self, value: Any) -> list[Any]:
        self.sent.append(value)
        return [value, self.exchanges.pop(0)]

    def sum_(self, tensor_N: torch.Tensor, *, label: str) -> torch.Tensor:
        if label.startswith("report"):
            tensor_N[6] += self.failed  # behind loss, correct, samples, two times and the energy
        return tensor_N


def test_stream_images_of_steps_that_do_not_count_are_not_told() -> None:
    """The input of the other rank failed at step 2 already, and was slow to say so."""
    batches = make_batches()
    batches[0], batches[ACCUMULATION] = with_bad(batches[0], 3), with_bad(batches[ACCUMULATION], 3)
    batches[2 * ACCUMULATION] = with_bad(batches[2 * ACCUMULATION], 12)
    other = OtherRank([[2, LOST], [[5, "5.JPEG: is empty"]], "saved"], failed=1.0)
    recorder = Recorder()
    plan = replace(STEPS, log_every_steps=3)
    with pytest.raises(DataError, match=naming(LOST, "step 2.")):
        train(plan, replace(other.parts, communicator=other), recorder, iter(batches))  # type: ignore[arg-type]
    told = {"train/3": "3.JPEG: is not an image", "train/5": "5.JPEG: is empty"}
    assert recorder.events == [("skipped", 2, told), ("save", 2, None)]


def evaluate_beside(other: OtherRank, batches: Iterator[Batch], *, num_samples: int, **options: Any) -> dict[str, Any]:
    return evaluate(
        other.parts.model,
        batches,
        normalize=other.parts.normalize,
        communicator=other,  # type: ignore[arg-type]
        num_samples=num_samples,
        **options,
    )


@pytest.mark.parametrize(("num_batches", "num_exchanges"), [(0, 1), (1, 2), (7, 2), (8, 2), (9, 3), (16, 3)])
def test_stream_evaluation_exchanges_failures_at_the_same_batches(num_batches: int, num_exchanges: int) -> None:
    """Exchanges come before every eighth batch and at the end; a rank that fails comes to the next of these."""
    whole = OtherRank([""] * num_exchanges)
    if num_batches:
        record = evaluate_beside(whole, iter(make_batches(num_batches)), num_samples=num_batches * SPAN)
        assert record["count"] == num_batches * SPAN
        assert len(whole.sent) == num_exchanges
    failed = OtherRank([""] * num_exchanges)
    with pytest.raises(DataError, match=naming(LOST)):
        evaluate_beside(failed, failing(make_batches(num_batches)), num_samples=99 * SPAN)
    assert len(failed.sent) == num_exchanges
    assert failed.sent[-1] == LOST


def test_stream_evaluation_ends_at_the_next_exchange_after_a_failure_elsewhere() -> None:
    drawn = []

    def noted() -> Iterator[Batch]:
        for number, batch in enumerate(make_batches(20)):
            drawn.append(number)
            yield batch

    name = "/data/\udcff.JPEG: is not an image"
    with pytest.raises(DataError) as raised:
        evaluate_beside(OtherRank(["", name]), noted(), num_samples=20 * SPAN)
    assert raised.value.args == (name,)
    assert drawn == list(range(9))


@pytest.mark.parametrize("num_batches", [0, 1, 7, 8, 9])
def test_stream_evaluation_passes_as_many_boundaries_where_the_input_fails_as_elsewhere(num_batches: int) -> None:
    """Or the ranks would not agree on where to stop."""
    passed: Counter[str] = Counter()
    num_exchanges = 1 + -(-num_batches // 8)
    for rank, batches, heard in (
        ("failed", failing(make_batches(num_batches)), [""] * num_exchanges),
        ("whole", iter(make_batches(20)), [""] * (num_exchanges - 1) + [LOST]),
    ):
        with pytest.raises(DataError, match=naming(LOST)):
            evaluate_beside(
                OtherRank(heard), batches, num_samples=20 * SPAN, between_batches=partial(passed.update, [rank])
            )
    assert passed["failed"] == passed["whole"] == num_exchanges - 1


def test_stream_bad_images_of_an_evaluation_are_told_once_by_position() -> None:
    told: list[dict[int, str]] = []
    batches = [with_bad(batch, 4) for batch in make_batches(2)]
    batches[0].valid_B[0] = False
    record = evaluate_beside(OtherRank(["", "", [[4, "4.JPEG: is not an image"]]]), iter(batches),
                             num_samples=2 * SPAN, skipped=told.append)  # fmt: skip
    assert told == [{4: "4.JPEG: is not an image"}]
    assert record["count"] == 2 * SPAN - 1
