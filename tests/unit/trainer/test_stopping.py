"""When evaluations end a run, and which settings of that are refused."""

import math
import re
from typing import Any

import pytest
from error_texts import naming

from bigbatch.trainer.config.checks import METRICS
from bigbatch.trainer.config.sections import RunConfig
from bigbatch.trainer.evaluator import reason_to_end
from tests.unit.trainer.config.test_schema import make_config, refusal


def evaluations(*values: float, metric: str = "top1") -> list[dict[str, Any]]:
    others = dict.fromkeys(METRICS, 0.5)
    return [{"step": 10 * (i + 1), **others, metric: value} for i, value in enumerate(values)]


def reason(records: list[dict[str, Any]], **changes: Any) -> str | None:
    return reason_to_end(records, RunConfig(**changes))


def test_stopping_without_a_rule_nothing_ends() -> None:
    assert reason(evaluations(*[0.5] * 50)) is None
    assert reason([]) is None


@pytest.mark.parametrize("values", [[0.8], [0.1, 0.75], [0.1, 0.76, 0.3]])
def test_stopping_target_that_was_reached_ends_the_run(values: list[float]) -> None:
    text = reason(evaluations(*values), target_top1=0.75)
    assert text is not None
    assert text.startswith("run.target_top1=0.75: top-1 was 0.")
    assert reason(evaluations(*[v for v in values if v < 0.75]), target_top1=0.75) is None


def end(values: list[float], *, metric: str, after: int) -> int | None:
    """Number of evaluations after which a run ends."""
    records = evaluations(*values, metric=metric)
    counts = (
        n for n in range(len(values) + 1) if reason(records[:n], stop_metric=metric, stop_after_evaluations=after)
    )
    return next(counts, None)


@pytest.mark.parametrize(
    ("values", "after", "expected"),
    [
        ([1, 2, 3, 4, 5], 1, None),
        ([1, 2, 2, 3], 1, 3),  # a repetition is not progress
        ([1, 2, 2, 3, 3, 3], 2, 6),
        ([5, 4, 3, 2, 1], 3, 4),
        ([1, 3, 2, 2.5], 2, 4),
        ([1, 3, 2, 3], 3, None),
    ],
)
def test_stopping_patience_is_counted_from_the_first_best(
    values: list[float], after: int, expected: int | None
) -> None:
    for metric, sign in (("top1", 1), ("top5", 1), ("loss", -1)):
        assert end([sign * v for v in values], metric=metric, after=after) == expected, metric


def test_stopping_a_loss_without_a_value_is_never_the_best() -> None:
    assert end([math.nan, 3, 2, 1], metric="loss", after=2) is None
    assert end([math.nan, math.nan, math.inf, 1], metric="loss", after=2) == 3
    assert end([3, math.nan, 2, math.inf, math.nan], metric="loss", after=2) == 5


def test_stopping_reason_names_rule_and_best() -> None:
    text = reason(evaluations(0.5, 0.25, 0.75, metric="loss"), stop_metric="loss", stop_after_evaluations=1)
    assert re.search(naming("run.stop_metric=loss: ", " 1 evaluation", " 0.2500 ", "step 20"), text)


@pytest.mark.parametrize(("every", "offset", "num"), [(1, 0, 10), (4, 0, 3), (4, 2, 3), (4, 1, 4), (10, 0, 1)])
def test_stopping_patience_beyond_the_run_is_refused(every: int, offset: int, num: int) -> None:
    """The first evaluation is the best so far: as many as the run has cannot all be worse."""
    run = {"run.epochs": 10, "run.eval_every_epochs": every, "run.eval_offset_epochs": offset}
    rule = {**run, "run.stop_metric": "loss"}
    named = naming(f"run.stop_after_evaluations={num} ", f" {num} evaluations", "run.stop_metric")
    assert re.search(named, refusal({**rule, "run.stop_after_evaluations": num}))
    if num > 1:
        make_config({**rule, "run.stop_after_evaluations": num - 1})
