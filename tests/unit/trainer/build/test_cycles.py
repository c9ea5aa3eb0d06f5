"""From a config's epochs to the steps of its cycles, and into the groups of its optimizer."""

from dataclasses import replace
from typing import Any

import pytest
from small_run import PLAN

from bigbatch.errors import ConfigError
from bigbatch.trainer.build.plan import make_momentum_of, make_schedule_of
from bigbatch.trainer.config.file import load_config

CYCLIC = ("--schedule.name=cyclic", "--schedule.warmup_epochs=0", "--schedule.base_lr=4")
PLAN_OF_FOUR: Any = replace(PLAN, steps_per_epoch=4, num_steps=48)


def test_cycles_of_an_epoch_are_those_of_its_steps() -> None:
    options = (*CYCLIC, "--schedule.options.cycle_epochs=1", "--schedule.end_lr=0", "--schedule.low_momentum=0.5")
    config = load_config(["--config", "quickstart", *options])
    rate = make_schedule_of(config, PLAN_OF_FOUR)
    assert [rate(step) for step in range(8)] == [2, 4, 2, 0] * 2
    lower = make_schedule_of(
        load_config(["--config", "quickstart", *options, "--schedule.options.cycle_factor=0.5"]), PLAN_OF_FOUR
    )
    assert [lower(step) for step in range(7)] == [2, 4, 2, 0, 1, 2, 1]
    momentum = make_momentum_of(config, rate)
    assert momentum is not None
    assert [momentum(step) for step in range(4)] == pytest.approx([0.7, 0.5, 0.7, 0.9])
    assert make_momentum_of(load_config(["--config", "quickstart", *CYCLIC]), rate) is None


def test_a_cycle_of_less_than_two_steps_is_refused() -> None:
    config = load_config(["--config", "quickstart", *CYCLIC, "--schedule.options.cycle_epochs=0.25"])
    with pytest.raises(ConfigError, match=r"schedule: a cycle must have at least 2 steps, not 1\.0"):
        make_schedule_of(config, PLAN_OF_FOUR)
