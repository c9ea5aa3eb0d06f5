"""A schedule of another package, by its import path, in a small package outside of the project."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_run import PLAN

from bigbatch.errors import ConfigError
from bigbatch.trainer.build.plan import make_momentum_of, make_schedule_of
from bigbatch.trainer.config.file import load_config

SOURCE = '''
def restarts(*, base_lr, warmup_steps, total_steps, cycles=1):
    """Fall to 0 in each of some cycles."""
    length = total_steps / cycles
    return lambda step: base_lr * (1 - (step % length) / length)

class Halved:
    def __init__(self, *, base_lr, warmup_steps, total_steps):
        self.numbers = base_lr, warmup_steps, total_steps

    def __call__(self, step):
        return self.numbers[0] / 2

def number(**options): return 0.1
def negative(**options): return lambda step: 3.0 - step
def text(**options): return lambda step: "0.1"
def unending(**options): return lambda step: float("nan")
def failing(**options): return lambda step: 1 / (5 - step)
constant = 0.1
'''
PLAN_OF_FOUR: Any = replace(PLAN, steps_per_epoch=4, num_steps=32)


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "schedules_of_a_user").mkdir()
    (tmp_path / "schedules_of_a_user/forms.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)


def config_of(name: str, *words: str) -> Any:
    options = ("--run.epochs=8", "--schedule.base_lr=2", "--schedule.warmup_epochs=1", *words)
    return load_config(["--config", "quickstart", f"--schedule.name={name}", *options])


def test_schedule_of_a_user_gets_numbers_in_steps_and_its_options() -> None:
    config = config_of(
        "schedules_of_a_user.forms.restarts", "--schedule.options.cycles=4", "--schedule.low_momentum=0.5"
    )
    assert config.schedule.end_lr is None, "the default of others does not apply"
    rate = make_schedule_of(config, PLAN_OF_FOUR)
    assert [rate(step) for step in range(10)] == [2 - (step % 8) / 4 for step in range(10)]
    assert rate(1000) == rate(31), "steps after the last take its value"
    momentum = make_momentum_of(config, rate)
    assert momentum is not None
    assert momentum(4) == pytest.approx(0.7)


def test_schedule_of_a_user_may_be_a_class() -> None:
    rate: Any = make_schedule_of(
        config_of("schedules_of_a_user.forms.Halved", "--schedule.decay_epochs=3"), PLAN_OF_FOUR
    )
    assert rate(0) == 1.0


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_package.form", ("no_such_package", "install the package")),
        ("schedules_of_a_user.forms.restart", ("has no such class or function", "the nearest is restarts")),
        ("schedules_of_a_user.forms.constant", ("has no such class or function",)),
        ("schedules_of_a_user.forms.number", ("returns a float", "function of the step")),
        ("schedules_of_a_user.forms.negative", ("-1.0 at step 4", "at least 0")),
        ("schedules_of_a_user.forms.text", ("'0.1' at step 0", "finite number")),
        ("schedules_of_a_user.forms.unending", ("nan at step 0", "finite number")),
        ("schedules_of_a_user.forms.failing", ("fails at step 5", "ZeroDivisionError")),
        ("torch.optim.lr_scheduler.StepLR", ("your own package",)),
        ("subprocess.Popen", ("your own package",)),
        ("bigbatch.trainer.optim.schedule.cosine", ("short names",)),
    ],
)
def test_schedule_that_does_not_fit_is_named_in_one_line(name: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        make_schedule_of(config_of(name), PLAN_OF_FOUR)
    text = str(refused.value)
    assert text.startswith(f"schedule.name={name}"), text
    assert "\n" not in text
    assert all(word in text for word in words), text


def test_schedule_that_does_not_take_its_options_is_named_with_them() -> None:
    config = config_of("schedules_of_a_user.forms.restarts", "--schedule.options.circles=4")
    with pytest.raises(ConfigError, match=r"does not take .* the options {'circles': 4}: TypeError"):
        make_schedule_of(config, PLAN_OF_FOUR)


@pytest.mark.parametrize(
    ("word", "refusal"),
    [
        ("--schedule.options.total_steps=4", "must not state total_steps: set schedule.decay_epochs"),
        ("--schedule.end_lr=0", "schedule.end_lr=0.0 has no meaning with schedule.name=schedules_of_a_user.forms.x"),
    ],
)
def test_keys_that_a_schedule_of_a_user_does_not_take_are_refused(word: str, refusal: str) -> None:
    with pytest.raises(ConfigError, match=refusal):
        config_of("schedules_of_a_user.forms.x", word)


@pytest.mark.parametrize("name", ["cosin", "mypackage/cosine", "a..b"])
def test_schedule_of_an_unknown_name_is_refused_without_an_import(name: str) -> None:
    with pytest.raises(ConfigError, match=r"must be one of 'polynomial', .* or the import path"):
        config_of(name)
