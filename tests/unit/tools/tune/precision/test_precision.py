"""Underflow and overflow at each loss scale, by closed forms and by torch's own rounding; the choice; the command."""

import json
import math
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from error_texts import naming
from tiny_training import TINY_OPTIONS, bigbatch
from torch import nn

from bigbatch.comm.communicator import Communicator
from bigbatch.errors import INTERRUPTED, ConfigError, RunFolderError, TuneError
from bigbatch.tools.tune.precision import recommend as command
from bigbatch.tools.tune.precision import steps
from bigbatch.tools.tune.precision.recommend import choose_scale, recommend, scale_records
from bigbatch.tools.tune.precision.steps import FP32_LEAST, NUM_BINS, Gradients, Magnitudes, measure, sum_over_ranks
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config, lookup, with_values
from bigbatch.trainer.step.loss_scale import underflow_fraction
from bigbatch.trainer.step.stop_request import Stopped

LADDER = torch.tensor([2.0**-power for power in range(60)])
"""1, a half, and so on to 2^-59."""


@pytest.mark.parametrize("scale_power", [0, 8, 16, 24])
def test_shares_are_those_of_rounding_to_fp16(scale_power: int) -> None:
    found = measure([LADDER])
    # 2^(s - k) < 2^-24 if k > s + 24
    assert found.lost(scale_power=scale_power) == pytest.approx((60 - 1 - (scale_power + 24)) / 60)
    assert found.underflow(scale_power=scale_power) == pytest.approx((60 - 1 - (scale_power + 14)) / 60)
    half = (LADDER * 2.0**scale_power).half()
    assert found.lost(scale_power=scale_power) == pytest.approx(float((half == 0).sum()) / 60)
    assert found.overflow(scale_power=scale_power) == pytest.approx(float(half.isinf().sum()) / 60)
    assert found.headroom(scale_power=scale_power) == 16 - scale_power - 1


def test_underflow_is_what_a_run_reports() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(40, 30) * 1e-5, torch.randn(500) * 1e-6, torch.zeros(7)]
    found = measure(gradients)
    assert (found.counts[0], sum(found.counts)) == (7, 1707)
    for power in (0, 3, 10):
        half = [(each * 2.0**power).half() for each in gradients]
        reported = underflow_fraction(half, sum_parts=lambda counts: counts)
        # numbers just below 2^-14 are rounded up to it
        assert found.underflow(scale_power=power) == pytest.approx(reported, abs=2e-3)


def even(lowest: int, highest: int, *, zeros: int = 0) -> Magnitudes:
    """One value at each power of two."""
    counts = [0] * NUM_BINS
    counts[0] = zeros
    for power in range(lowest, highest + 1):
        counts[power - FP32_LEAST + 1] = 1
    return Magnitudes(tuple(counts))


def test_counts_add_up_over_tensors_and_ranks() -> None:
    one, two = measure([torch.tensor([1.0, 0.0])]), measure([torch.tensor([2.0**-149, -8.0]), torch.zeros(0)])
    assert one == even(0, 0, zeros=1)
    assert two == even(-149, -149) + even(3, 3)
    assert measure([torch.tensor([3.0, torch.nan, -torch.inf])]).counts[-2:] == (0, 2)
    assert measure([torch.zeros(3)]).headroom(scale_power=24) > 100

    class Both:
        def gather(self, value: Any) -> list[Any]:
            return [value, two.counts]

    assert sum_over_ranks(one, Both()) == one + two  # type: ignore[arg-type]


CONFIG = load_config(["--config", "quickstart", "--optimizer.precision=fp16"])


@pytest.mark.parametrize(
    ("weights", "activations", "expected"),
    [
        # 2^-30 reaches 2^-14 with 2^16, and 2^-9 still has room to double eight times: static
        (even(-30, -9), even(-20, -12), ("fp16", 2.0**16, None)),
        (even(-30, -8), even(-20, -12), ("fp16", 2.0**16, 2000)),
        # 2^-1 has room to double three times at 2^13: 2^-27 is then at 2^-14
        (even(-27, -1), even(-5, -1), ("fp16", 2.0**13, 2000)),
        # as many zeros as values: weights must not lose digits up to that share
        (even(-30, -17), even(-20, -17, zeros=4), ("fp16", 2.0**16, None)),
        (even(-60, -1), even(-5, -1), ("bf16", None, None)),  # the best scale, 2^13, loses what is below 2^-37
        (even(20, 20), even(-5, -1), ("bf16", None, None)),  # overflows at every scale
    ],
)
def test_precision_and_smallest_scale_with_the_least_underflow(
    weights: Magnitudes, activations: Magnitudes, expected: tuple[str, float | None, int | None]
) -> None:
    records = scale_records(Gradients(weights, activations))
    values, _ = recommend(records, CONFIG)
    assert tuple(values.values()) == expected
    with_values(CONFIG, values)
    best = choose_scale(records)
    if expected[0] == "fp16":
        assert best is not None
        assert best["weights_overflow"] == 0
        assert best["weights_underflow"] == 0


def test_autocast_and_growth_steps_stay() -> None:
    config = with_values(CONFIG, {"optimizer.precision": "fp16_autocast", "optimizer.loss_scale_growth_steps": 500})
    values, _ = recommend(scale_records(Gradients(even(-27, -1), even(-5, -1))), config)
    assert (values["optimizer.precision"], values["optimizer.loss_scale_growth_steps"]) == ("fp16_autocast", 500)


@pytest.mark.parametrize(
    ("options", "named"), [(["--steps", "0"], ("--steps 0 ",)), (["--run.epoch", "2"], (" run.epoch;", " run.epochs"))]
)
def test_tune_precision_refuses_options(options: list[str], named: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=naming(*named)):
        command.main(["--config", "quickstart", "--out", str(tmp_path), *options])


def test_dry_run_says_what_would_be_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--config", "quickstart", "--out", str(tmp_path / "out"), "--dry-run"]) == 0
    assert "8 steps of 512 images in fp32" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_tune_precision_predicts_what_training_so_reports(tmp_path: Path) -> None:
    tuned = bigbatch(
        *["tune", "precision", "--config", "quickstart", "--steps", "3", *TINY_OPTIONS],
        *["--optimizer.precision=fp16", "--out", str(tmp_path / "out")],
    )
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr
    found = json.loads((tmp_path / "out/precision.json").read_text())
    scale = found["recommended"]["optimizer.loss_scale"]
    row = next(each for each in found["loss_scales"] if each["loss_scale"] == scale)

    program, *words = shlex.split(tuned.stdout.splitlines()[-1])
    assert program == "bigbatch"
    trained = bigbatch(
        *words,
        *["--run.epochs=1", "--schedule.warmup_epochs=0", "--run.log_every_steps=1"],
        *["--run.directory", str(tmp_path / "run")],
    )
    assert trained.returncode == 0, trained.stdout + trained.stderr
    lines = (json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    reports = [line for line in lines if line["kind"] == "train"][:3]
    assert [each["overflow_steps"] for each in reports] == [0, 0, 0]
    mean = sum(each["underflow_fraction"] for each in reports) / 3
    assert mean == pytest.approx(row["weights_underflow"], abs=0.03)
    assert [each["loss"] for each in reports] == pytest.approx(found["loss_fp32"], rel=0.05)


@pytest.mark.parametrize("gradient", [1.0, math.inf])
def test_gradients_of_both_kinds_are_counted_and_must_be_finite(
    gradient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))

    @contextmanager
    def few_steps(config: Config, *_: object, **__: object) -> Iterator[Any]:
        assert config.optimizer.precision == "fp32"

        def run(on_report: Callable[[dict[str, Any]], None], after_step: Callable[[int], None]) -> None:
            model(torch.ones(4, 2)).backward(torch.full((4, 3), gradient))
            on_report({"loss": 2.0})
            after_step(1)

        yield SimpleNamespace(model=model, precision=SimpleNamespace(masters=dict(model.named_parameters()))), run

    monkeypatch.setattr(steps, "few_steps", few_steps)
    connection = SimpleNamespace(gather=lambda value: [value, value])
    communicator = cast(Communicator, SimpleNamespace(connection=connection))
    with nullcontext() if gradient == 1 else pytest.raises(TuneError, match=naming("step 1 ", "schedule.base_lr")):
        found = steps.count_gradients(CONFIG, communicator, num_steps=1, say=lambda text: None)
        assert sum(found.weights.counts) == 2 * 3 + 3  # those of the norm stay fp32
        assert sum(found.activations.counts) == 2 * 4 * 3
        assert found.losses == [2.0]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Replace the training, on one rank."""
    training = Mock(return_value=Gradients(even(-24, -15), even(-20, -15)))
    monkeypatch.setattr(command, "count_gradients", training)
    monkeypatch.setattr(command, "bind_rank", lambda *_: None)
    monkeypatch.setattr(command, "join_job", lambda *_: (Mock(rank=0), None))
    monkeypatch.setattr(command, "write_on_first", lambda write, **_: write())
    return training


def test_command_takes_what_is_recommended_though_another_value_was_given(
    tmp_path: Path, counted: Mock, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["--optimizer.precision=fp16", "--optimizer.loss_scale", "8", "--optimizer.loss_scale_growth_steps=50"]
    assert command.main(["--config", "quickstart", "--out", str(tmp_path), *overrides]) == 0
    words = shlex.split(capsys.readouterr().out.splitlines()[-1])
    taken = load_config(words[2:])
    recommended = json.loads((tmp_path / "precision.json").read_text())["recommended"]
    assert recommended["optimizer.loss_scale"] == 1024
    assert {key: lookup(taken, key) for key in recommended} == recommended


def test_folder_that_cannot_be_written_is_refused_before_training(counted: Mock) -> None:
    counted.side_effect = AssertionError("trained")
    with pytest.raises(RunFolderError, match=naming(" /proc/none: ")):
        command.main(["--config", "quickstart", "--out", "/proc/none"])


def test_result_is_printed_though_the_disk_is_full(
    counted: Mock, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "require_writable", lambda folder: None)
    with pytest.raises(RunFolderError, match=naming(" /proc/none/precision.json: ")):
        command.main(["--config", "quickstart", "--out", "/proc/none"])
    assert "--optimizer.loss_scale 1024.0" in capsys.readouterr().out


def test_stop_leaves_by_its_exit_code_and_writes_nothing(tmp_path: Path, counted: Mock) -> None:
    counted.side_effect = Stopped("SIGINT")
    assert command.main(["--config", "quickstart", "--out", str(tmp_path)]) == INTERRUPTED
    assert not list(tmp_path.iterdir())
