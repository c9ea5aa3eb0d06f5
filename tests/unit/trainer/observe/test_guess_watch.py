"""A loss that is not finite, and the observer that ends a run whose loss stays that of a guess."""

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
from error_texts import naming

from bigbatch.errors import TrainingDiverged
from bigbatch.trainer.observe.guess_watch import MARGIN, GuessWatch
from bigbatch.trainer.step.divergence import not_finite

GUESS = math.log(10)


def ends(loss: float, finite_steps: list[int]) -> str:
    """The error; finite_steps: of each rank, before its loss was not finite."""
    return str(not_finite(loss, first_step=100, counts=finite_steps))


@pytest.mark.parametrize("loss", [math.inf, -math.inf, math.nan])
def test_not_finite_names_the_first_step_without_a_number(loss: float) -> None:
    named = naming(f" {loss} ", "step 108: ", "schedule.base_lr")
    assert re.search(named, ends(loss, [7]))
    assert re.search(named, ends(loss, [7, 7, 7]))


def test_not_finite_names_the_ranks_where_it_began() -> None:
    assert re.search(naming("step 103, ", "rank 1 of 3 "), ends(math.nan, [3, 2, 3]))
    assert re.search(naming("step 101, ", "ranks 0, 2 of 4 "), ends(math.nan, [0, 1, 0, 5]))
    named = naming("step 103, ", "rank 1 of 2 ", "schedule.base_lr", "schedule.warmup_epochs")
    assert re.search(named, ends(math.nan, [3, 2]))


def guess_watch(*, steps: int = 10, num_classes: int = 10, warmup_steps: int = 0, first_step: int = 0) -> GuessWatch:
    """With one step per epoch."""
    observed: Any = SimpleNamespace(
        config=SimpleNamespace(
            run=SimpleNamespace(divergence_steps=steps),
            data=SimpleNamespace(num_classes=num_classes),
            schedule=SimpleNamespace(warmup_epochs=warmup_steps),
        ),
        plan=SimpleNamespace(steps_per_epoch=1, first_step=first_step),
    )
    return GuessWatch(observed)


def watch(reports: list[tuple[int, float]], **changes: int) -> int | None:
    """The step at which a run with these reports ends."""
    watching = guess_watch(**changes)
    for step, loss in reports:
        try:
            watching.at_report({"step": step, "loss": loss})
        except TrainingDiverged:
            return step
    return None


def every(num: int, losses: list[float]) -> list[tuple[int, float]]:
    return [(num * (i + 1), loss) for i, loss in enumerate(losses)]


def test_guess_watch_ends_the_run_after_so_many_steps() -> None:
    assert watch(every(1, [GUESS] * 30)) == 10
    assert watch(every(4, [GUESS] * 30)) == 12, "the first report that covers ten steps"
    assert watch(every(25, [GUESS] * 30)) == 25
    assert watch(every(1, [GUESS] * 9 + [0.0] + [GUESS] * 30)) == 20
    assert watch(every(1, [GUESS * (1 - 0.9 * MARGIN)] * 30)) == 10
    assert watch(every(1, [GUESS * (1 - 1.1 * MARGIN)] * 1000)) is None


def test_guess_watch_lets_a_run_go_on_whose_loss_falls_from_above_a_guess() -> None:
    """After the warm-up of a small batch: losses of 3.0, then 2.0, with mean 2.5."""
    assert watch(every(1, [3.0] * 5 + [2.0] * 5 + [1.5] * 30)) is None
    assert watch(every(4, [3.5, 3.0, 2.1, 2.0, 1.9, 1.8]), steps=20) is None
    assert watch(every(1, [9.0] * 5 + [GUESS] * 5)) == 10, "it fell to a guess, and not below"


def test_guess_watch_weights_its_mean_by_steps() -> None:
    """Reports of 1 step between those of 9: their losses differ, and their plain mean would be that of a guess."""
    reports, step = [], 0
    for _ in range(10):
        reports += [(step + 1, 3.0), (step + 10, 2.0)]
        step += 10
    assert (3.0 + 2.0) / 2 > GUESS > (3.0 + 9 * 2.0) / 10
    assert watch(reports) is None


def test_guess_watch_does_not_count_the_warm_up() -> None:
    assert watch(every(1, [GUESS] * 60), warmup_steps=25) == 35
    assert watch(every(2, [GUESS] * 60), warmup_steps=25) == 36, "a report that began in the warm-up is left out"
    assert watch(every(1, [9.9] * 25 + [1.0] * 60), warmup_steps=25) is None


def test_guess_watch_gives_a_resumed_run_as_many_steps_again() -> None:
    reports = [(step, GUESS) for step in range(41, 80)]
    assert watch(reports, first_step=40, warmup_steps=5) == 50
    assert watch(reports, first_step=40, warmup_steps=45) == 55


def test_guess_watch_names_steps_loss_and_remedy() -> None:
    watching = guess_watch(steps=2, num_classes=1000)
    watching.at_report({"step": 1, "loss": 6.9})
    with pytest.raises(TrainingDiverged) as caught:
        watching.at_report({"step": 2, "loss": 7.0})
    facts, remedies = ("loss", " 6.950 ", "steps 1 to 2", " 6.908"), ("schedule.base_lr", "schedule.warmup_epochs")
    assert re.search(naming(*facts, *remedies, "run.divergence_steps"), str(caught.value))
