"""One answer to all that is wrong with an experiment, and no word of what only follows from it."""

import re
import shlex
from pathlib import Path

import pytest
from error_texts import naming

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.file import load_config


def refusals(*options: str, config: str = "quickstart") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(["--config", config, *options])
    return str(caught.value).split("\n")


def test_refusals_come_all_at_once(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "base: quickstart\nrun: {seed: -1, epochz: 3}\noptimiser: {momentum: 0.5}\nmodel: {options: {width: wide}}\n"
    )
    options = "--data.flip=maybe --comm.foo 3 --zzqq 1 --batch.global_batch_size=96 --schedule.end_lr=100"
    named = (
        ("comm.foo",),
        ("zzqq", "--help"),
        ("data.flip=maybe", "bool"),
        ("mine.yaml", "run.epochz", "run.epochs"),
        ("run.seed=-1", "0 or more"),
        ("mine.yaml", "optimiser", "optimizer"),
        ("model.options.width=wide", "int"),
        ("batch.global_batch_size=96", "batch.microbatch_size=128"),
        ("schedule.end_lr=100", "schedule.base_lr=8"),
    )
    lines = refusals(*options.split(), config=str(recipe))
    assert len(lines) == len(named)
    for parts in named:
        assert any(re.search(naming(*parts), line) for line in lines), parts


def test_refusals_of_one_topic_come_all_at_once() -> None:
    assert len(refusals("--augment.cutout_size=7", "--augment.randaugment_ops=2")) == 2


@pytest.mark.parametrize(
    "wrong", ["--run.epochs=zero", "--run.epochs=-1", "--run.epoch=1", "--schedule.warmup_epochs=-1"]
)
def test_refusals_leave_out_what_may_only_follow(wrong: str) -> None:
    """The schedule is too long for one epoch, but it may be another number that was meant."""
    assert len(refusals("--schedule.warmup_epochs=20", wrong)) == 1


def test_refusals_of_options_come_with_that_of_the_recipe_name() -> None:
    assert len(refusals("--run.epochs=zero", config="quikstart")) == 2


@pytest.mark.parametrize(
    "config", ["quickstart", "cifar10_24epochs", "imagenet/fast_resnet50_16", "imagenet/nus_resnet50_8k"]
)
def test_refusals_of_a_shortened_run_name_the_whole_schedule_that_fits(config: str) -> None:
    *_, last = refusals("--run.epochs=2", "--schedule.warmup_epochs=2.5", config=config)
    assert "--schedule.warmup_epochs" not in last  # which was typed just now
    *_, last = refusals("--run.epochs=1", config=config)
    options = shlex.split(last.partition(", add ")[2])
    shortened = load_config(["--config", config, "--run.epochs=1", *options])
    assert 0 < shortened.schedule.warmup_epochs < 1


def test_refusals_of_a_run_that_is_no_shorter_name_no_schedule() -> None:
    assert len(refusals("--schedule.warmup_epochs=13")) == 1


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--run.loggers=[comet]", ("run.loggers", "comet", "tensorboard, wandb, mlflow")),
    ],
)
def test_loggers_that_say_nothing_are_refused(option: str, named: tuple[str, ...]) -> None:
    (line,) = refusals(option)
    assert re.search(naming(*named), line)
