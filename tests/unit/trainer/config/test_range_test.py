"""A peak that comes from a range test: of the same recipe, or not at all."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from error_texts import naming

from bigbatch.errors import ConfigError
from bigbatch.tools.tune.range.curve import Suggestion
from bigbatch.tools.tune.range.rising_rate import range_record
from bigbatch.trainer.config.file import dump_config, load_config, resolve

RESIDENT = ("--data.loader=resident", "--data.crop=padded", "--data.crop_area_min=null")
ONE_CYCLE = ("--config", "quickstart", "--schedule.name=one_cycle")


def write_test(folder: Path, *overrides: str, rate: float | None = 2.5) -> Path:
    """What `bigbatch tune range` leaves for the quick start with these overrides."""
    config = load_config(["--config", "quickstart", "--run.divergence_steps=null", *overrides])
    record = range_record([1.0, 2.0], [2.3, 2.2], Suggestion(rate, None, rate), config=dump_config(config))
    folder.mkdir()
    (folder / "range.json").write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize("place", ["", "range.json"])
def test_the_peak_is_what_the_range_test_suggests(place: str, tmp_path: Path) -> None:
    # where it runs and how it is scheduled is not part of what a rate does
    folder = write_test(tmp_path / "test", "--data.num_threads=3", "--batch.microbatch_size=256", "--run.seed=4")
    found = resolve([*ONE_CYCLE, f"--schedule.range_test={folder / place}"])
    assert found.config.schedule.base_lr == 2.5
    assert found.config.schedule.range_test is None, "the run states a number, and needs no file to continue"
    assert found.origins["schedule.base_lr"].startswith("range test ")
    folder = write_test(tmp_path / "beside", *RESIDENT, "--data.resident_on=host")
    assert load_config([*ONE_CYCLE, *RESIDENT, f"--schedule.range_test={folder}"]).schedule.base_lr == 2.5


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["--model.options.width=8"], ("model.options.width=8 there and 16 here", "repeat bigbatch tune range")),
        (["--data.mean=[0, 0, 0]"], ("data.mean=[0.0, 0.0, 0.0] there and [0.5, 0.5, 0.5] here",)),
        (["--optimizer.momentum=0.5"], ("optimizer.momentum=0.5 there and 0.9 here",)),
        (["--batch.global_batch_size=1024"], ("batch.global_batch_size=1024 there and 512 here",)),
    ],
)
def test_a_range_test_of_another_recipe_is_refused(
    overrides: list[str], named: tuple[str, ...], tmp_path: Path
) -> None:
    folder = write_test(tmp_path / "test", *overrides)
    with pytest.raises(ConfigError, match=naming("schedule.range_test=", *named)):
        load_config([*ONE_CYCLE, f"--schedule.range_test={folder}"])


def test_a_rate_on_the_command_line_goes_before_the_range_test_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("base: quickstart\nschedule: {range_test: runs/older}\n")
    found = resolve(["--config", str(file), "--schedule.base_lr=1.5"])
    assert (found.config.schedule.base_lr, found.origins["schedule.base_lr"]) == (1.5, "command line")
    with pytest.raises(ConfigError, match=naming("schedule.range_test=runs/older", "no such file")):
        load_config(["--config", str(file)])


def test_a_rate_that_is_stated_twice_is_refused(tmp_path: Path) -> None:
    folder = write_test(tmp_path / "test")
    with pytest.raises(ConfigError, match=naming("schedule.base_lr both state the rate")):
        load_config([*ONE_CYCLE, f"--schedule.range_test={folder}", "--schedule.base_lr=1"])


@pytest.mark.parametrize(
    "content",
    [None, "", "[]", "{}", *(f'{{"suggested_lr": 1{more}}}' for more in ("", ', "config": 5', ', "config": "a: ["'))],
)
def test_what_is_no_range_test_is_refused(content: Any, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "range.json").write_text(content)
    with pytest.raises(ConfigError, match=naming("schedule.range_test=", "bigbatch tune range has written")):
        load_config([*ONE_CYCLE, f"--schedule.range_test={tmp_path / 'range.json'}"])


@pytest.mark.parametrize("mean", ["!!binary aGVsbG8=", "!!set {a, b}", "&own [*own]"])
def test_recipe_of_values_that_no_config_has_is_no_range_test(mean: str, tmp_path: Path) -> None:
    file = write_test(tmp_path / "test") / "range.json"
    record = json.loads(file.read_text())
    record["config"] = re.sub(r"  mean:(\n  - .*)*", f"  mean: {mean}", record["config"])
    file.write_text(json.dumps(record))
    with pytest.raises(ConfigError, match=naming("schedule.range_test=", "range test")):
        load_config([*ONE_CYCLE, f"--schedule.range_test={file}"])


@pytest.mark.parametrize("rate", [None, 10**400, -1, True, "1"], ids=str)
def test_a_rate_that_is_none_is_refused(rate: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=naming("found no rate", "larger --to")):
        load_config([*ONE_CYCLE, f"--schedule.range_test={write_test(tmp_path / 'test', rate=rate)}"])


def test_a_pipe_without_writer_is_not_a_range_test(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "range.json")
    with pytest.raises(ConfigError, match=naming("schedule.range_test=", "range test")):
        load_config([*ONE_CYCLE, f"--schedule.range_test={tmp_path}"])
