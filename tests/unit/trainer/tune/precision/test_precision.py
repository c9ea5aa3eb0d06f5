"""What fp16 loses at each scale, by closed forms and by torch's own rounding; the choices; and the command."""

import json
import math
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from error_texts import naming

from bigbatch.errors import ConfigError, RunFolderError, TrainingDiverged, TuneError
from bigbatch.exit_codes import INTERRUPTED
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import lookup, with_values
from bigbatch.trainer.step.precision import underflow_fraction
from bigbatch.trainer.step.stop_request import Stopped
from bigbatch.trainer.tune.precision import recommend
from bigbatch.trainer.tune.precision.choices import (
    Choice,
    Gradients,
    SpanRow,
    WireRow,
    choose_predivide,
    choose_scale,
    scale_choice,
    span_choice,
    wire_choice,
)
from bigbatch.trainer.tune.precision.magnitudes import Magnitudes, measure, of_all_ranks
from bigbatch.trainer.tune.precision.report import Answer, explain
from bigbatch.trainer.tune.precision.steps import Counted
from bigbatch.trainer.tune.precision.wires import measure_wires

LADDER = torch.tensor([2.0**-power for power in range(60)])
"""1, a half, and so on to 2^-59."""


@pytest.mark.parametrize("scale_power", [0, 8, 16, 24])
def test_lost_are_those_below_the_smallest_number_of_fp16(scale_power: int) -> None:
    found = measure([LADDER])
    # 2^(s - k) < 2^-24 where k > s + 24
    assert found.lost(scale_power=scale_power) == (60 - 1 - (scale_power + 24)) / 60
    assert found.shortened(scale_power=scale_power) == (60 - 1 - (scale_power + 14)) / 60
    half = (LADDER * 2.0**scale_power).half()
    assert found.lost(scale_power=scale_power) == (half == 0).sum() / 60  # torch rounds halfway to even, to 0


def test_short_is_what_a_run_reports_as_underflow() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(40, 30) * 1e-5, torch.randn(500) * 1e-6, torch.zeros(7)]
    found = measure(gradients)
    assert (found.zeros, found.nonzero) == (7, 1700)
    for power in (0, 3, 10):
        half = [(each * 2.0**power).half() for each in gradients]
        reported = underflow_fraction(half, sum_parts=lambda counts: counts)
        # numbers just below 2^-14 are rounded up to it
        assert found.shortened(scale_power=power) == pytest.approx(reported, abs=2e-3)


def test_magnitudes_add_up_and_the_largest_tells_the_room() -> None:
    found = measure([torch.tensor([3.0, -5.0, 0.0])]) + measure([torch.tensor([2.0**-140, 4.0])])
    assert found == Magnitudes({1: 1, 2: 2, -140: 1}, zeros=1, largest=5.0)
    assert found.headroom(scale_power=4) == pytest.approx(math.log2(65504 / 5) - 4)
    assert measure([torch.zeros(3), torch.zeros(0)]).headroom(scale_power=24) == math.inf
    with pytest.raises(ValueError, match="not finite"):
        measure([torch.tensor([1.0, math.nan])])


def test_all_ranks_have_the_sum_of_what_each_has_counted() -> None:
    """Else they would choose differently."""
    one, two = measure([torch.tensor([1.0, 0.0])]), measure([torch.tensor([1.5, -8.0])])

    class Both:
        def gather_text(self, text: str) -> list[str]:
            return [text, json.dumps([{"counts": {"0": 1, "3": 1}, "zeros": 0, "largest": 8.0}])]

    assert of_all_ranks([one], Both()) == [one + two]  # type: ignore[arg-type]
    assert measure([torch.tensor([1.0, math.nan])], must_be_finite=False) == Magnitudes({0: 1}, largest=1.0)


def even(lowest: int, highest: int) -> Magnitudes:
    """One value at each power of two."""
    return Magnitudes(dict.fromkeys(range(lowest, highest + 1), 1), largest=2.0**highest)


def test_scale_is_the_smallest_that_loses_as_little_as_any() -> None:
    # 2^-30 reaches 2^-14 with 2^16, and 2^-10 has room for that: 2^6 of at most 2^15.999
    found = Gradients(even(-30, -10), even(-20, -12))
    power, reason = choose_scale(found)
    assert power == 16
    assert "0.00%" in reason
    assert scale_choice(found, growth_steps=500).values == {
        "optimizer.loss_scale": 65536.0,
        "optimizer.loss_scale_growth_steps": None,  # nearly ten powers are left
    }


def test_scale_stops_where_the_largest_needs_room() -> None:
    # 2^-1 may be multiplied by 2^13 so that 3 powers are left: 2^-30 is then at 2^-17, and three of 30 are short
    found = Gradients(even(-30, -1), even(-5, -1))
    power, reason = choose_scale(found)
    assert power == 13
    assert "10.00%" in reason
    changing = scale_choice(found, growth_steps=500).values  # since so few powers may not be enough for a whole run
    assert changing == {"optimizer.loss_scale": 8192.0, "optimizer.loss_scale_growth_steps": 500}
    assert scale_choice(found, growth_steps=None).values["optimizer.loss_scale_growth_steps"] == 2000


def test_scale_keeps_the_digits_of_weights_beside_activations_that_are_zero() -> None:
    """Half of the activations' are 0 at any scale: of weights as many could be short without being the larger share."""
    # all of 2^-33 and above reach 2^-14 with 2^19, half of them with 2^9
    found = Gradients(even(-33, -14), Magnitudes({-10: 1}, zeros=1, largest=2.0**-10))
    assert choose_scale(found)[0] == 19


def test_no_scale_holds_what_overflows() -> None:
    huge = Gradients(Magnitudes({20: 1}, largest=2.0**20), even(-5, -1))
    assert choose_scale(huge)[0] is None
    assert scale_choice(huge, growth_steps=None).values == {}


@pytest.mark.parametrize(
    ("weights", "num_ranks", "scale_power", "expected"),
    [
        (even(-10, -5), 1, 0, 1.0),
        (even(-20, -15), 1, 0, 2.0**-6),  # 2^-20 to 2^-14
        (even(-20, -15), 8, 0, 2.0**-9),  # an eighth of it, too
        (even(-20, -15), 1, 4, 2.0**-2),  # the loss scale has done four
        (even(-10, 14), 1, 0, 4.0),  # three powers of room for 2^14: 2^1.9993 without
    ],
)
def test_predivide_is_the_mildest_that_keeps_digits_and_room(
    weights: Magnitudes, num_ranks: int, scale_power: int, expected: float
) -> None:
    assert choose_predivide(weights, num_ranks=num_ranks, scale_power=scale_power) == expected


def test_wires_lose_what_their_formats_do() -> None:
    gradient_N = torch.full((64,), 2.0**-26)
    gradient_N[::32] = 1.0
    plain, fp16, lifted, bf16 = measure_wires(gradient_N, predivide=2.0**-4, num_ranks=1)
    assert (plain.wire_dtype, plain.lost, plain.error, plain.num_bytes) == (None, 0.0, 0.0, 4.0)
    assert fp16.lost == pytest.approx(62 / 64)
    assert (lifted.lost, bf16.lost) == (0.0, 0.0)  # 2^-22, a subnormal; bf16 has fp32's range
    assert lifted.headroom == pytest.approx(math.log2(65504) - 4)
    shared = measure_wires(gradient_N * 2.0**3, predivide=1.0, num_ranks=8)
    assert shared[1].lost == fp16.lost  # a rank's term is an eighth of the sum


ROWS = [
    WireRow(None, 1.0, 4.0, 0.0, 0.0, None),
    WireRow("float16", 1.0, 2.0, 0.1, 1e-4, 10.0),
    WireRow("float16", 0.25, 2.0, 0.0, 2e-4, 8.0),
    WireRow("bfloat16", 1.0, 2.0, 0.0, 2e-3, None),
]


def test_wire_of_half_the_bytes_that_loses_few_with_the_least_error() -> None:
    assert wire_choice(ROWS, num_ranks=8).values == {"comm.wire_dtype": "float16", "comm.predivide": 0.25}
    assert wire_choice([*ROWS[:2], *ROWS[3:]], num_ranks=8).values["comm.wire_dtype"] == "bfloat16"
    assert wire_choice(ROWS[:2], num_ranks=8).values == {}
    assert "--num-ranks" in wire_choice(ROWS, num_ranks=1).reason


def test_ghost_batch_changes_only_for_fewer_short_values() -> None:
    rows = [SpanRow(32, 0.05, 9.0, 2.0), SpanRow(16, 0.0495, 9.0, 1.0), SpanRow(64, 0.08, 9.0, 2.0)]
    assert span_choice(rows, own=32).values == {}
    assert span_choice([*rows, SpanRow(128, 0.01, 9.0, 3.0)], own=32).values == {"batch.bn_span": 128}
    measured = [SpanRow(128, 0.4654, 4.0, 2.2), SpanRow(64, 0.4625, 3.6, 2.2)]  # three seeds: 0.4636 to 0.4713
    assert span_choice(measured, own=128).values == {}


def answer_of(choice: Choice, *, failure: str = "") -> Answer:
    return Answer(
        precision="fp16",
        num_steps=2,
        num_ranks=8,
        gradients=Gradients(even(-30, -10), even(-20, 20)),
        largest=(0.1, 0.2),
        losses=(2.0, 1.0),
        spans=(SpanRow(32, 0.05, 9.0, 2.0),),
        wires=tuple(ROWS),
        choices={"choice": choice},
        failure=failure,
    )


def test_failure_to_train_so_is_told() -> None:
    answer = answer_of(Choice({"comm.wire_dtype": "float16"}, "why"), failure="all overflowed")
    text = "\n".join(explain(answer))
    assert "training so failed: all overflowed" in text
    assert "overflows" in text
    assert "choice: --comm.wire_dtype float16\n  why" in text


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--steps", "0"], ("--steps 0 ",)),
        (["--try-steps", "-1"], ("--try-steps -1: ",)),
        (["--num-ranks", "0"], ("--num-ranks 0 ",)),
        (["--spans", "96"], ("--spans 96: ", "batch.bn_span=96 ")),
        (["--run.epoch", "2"], (" run.epoch;", " run.epochs")),
    ],
)
def test_tune_precision_refuses_options(options: list[str], named: tuple[str, ...], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=naming(*named)):
        recommend.main(["--config", "quickstart", "--out", str(tmp_path), *options])


def test_dry_run_says_what_would_be_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", "quickstart", "--out", str(tmp_path / "out"), "--dry-run", "--spans", "64"]
    assert recommend.main(words) == 0
    text = capsys.readouterr().out
    assert "8 steps of 512 pictures in fp32, with batch.bn_span=128" in text
    assert "with batch.bn_span=64" in text
    assert not (tmp_path / "out").exists()


SYNTHETIC = {
    "data.loader": "synthetic",
    "data.num_synthetic_samples": 64,
    "data.image_size": 16,
    "data.probe_seconds": 0,
    "model.width": 2,
    "batch.global_batch_size": 16,
    "batch.microbatch_size": 8,
    "batch.bn_span": 8,
}
OPTIONS = [f"--{key}={value}" for key, value in SYNTHETIC.items()]


def tune(*options: str) -> subprocess.CompletedProcess[str]:
    words = ["tune", "precision", "--config", "quickstart", "--steps", "3", *OPTIONS, *options]
    return subprocess.run(
        [sys.executable, "-m", "bigbatch", *words], capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.long
def test_tune_precision_predicts_what_training_so_reports(tmp_path: Path) -> None:
    done = tune("--optimizer.precision=fp16", "--spans", "4", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out/precision.json").read_text())
    scale = found["recommended"]["optimizer.loss_scale"]
    row = next(each for each in found["loss_scales"] if each["loss_scale"] == scale)
    assert found["tried"]["overflow_steps"] == 0
    assert found["tried"]["underflow"] == pytest.approx([row["weights_shortened"]] * 2, abs=0.03)
    assert found["tried"]["losses"] == pytest.approx(found["loss_fp32"][:2], rel=0.05)
    assert [each["bn_span"] for each in found["ghost_batches"]] == [8, 4]
    assert (tmp_path / "out/precision.png").stat().st_size > 1000
    taken = load_config(["--config", str(tmp_path / "out/precision.yaml"), *OPTIONS, "--optimizer.precision=fp16"])
    assert taken.optimizer.loss_scale == scale
    assert "take it by bigbatch train --config" in done.stdout


def test_folder_that_takes_nothing_is_refused_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[object] = []
    monkeypatch.setattr(recommend, "search", lambda *_, **__: trained.append(0))
    with pytest.raises(RunFolderError, match=naming(" /proc/none: ")):
        recommend.main(["--config", "quickstart", *OPTIONS, "--out", "/proc/none"])
    assert not trained


def test_what_was_measured_is_told_where_it_cannot_be_written(capsys: pytest.CaptureFixture[str]) -> None:
    """A disk that has filled up meanwhile takes minutes of fp16 on a CPU with it otherwise."""
    with pytest.raises(RunFolderError, match=naming(" /proc/none/precision.json: ")):
        recommend._write(answer_of(Choice({}, "why")), Path("/proc/none"), base="quickstart", overrides=[])
    told = capsys.readouterr().out
    assert "choice: as it is\n  why\n" in told
    assert "left in" not in told


def test_command_takes_what_is_recommended_though_another_value_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An override goes before the file's value: the command would train with what was to be improved."""
    monkeypatch.setattr(recommend, "plot_answer", lambda *_, **__: None)  # takes a second
    best = {"optimizer.loss_scale": 256.0, "optimizer.loss_scale_growth_steps": None}
    overrides = [
        "--optimizer.precision=fp16",
        "--optimizer.loss_scale",
        "1024",
        "--optimizer.loss_scale_growth_steps=50",
    ]
    recommend._write(answer_of(Choice(best, "why")), tmp_path, base="quickstart", overrides=overrides)
    command = shlex.split(capsys.readouterr().out.rpartition("take it by bigbatch train ")[2])
    taken = load_config(command)
    assert {key: lookup(taken, key) for key in best} == best


class First:
    """A communicator as far as it is asked here."""

    rank = 0
    control = None

    def agree(self, what: str, text: str) -> None:
        """Nobody else may differ."""

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(("stops", "has_answer"), [("search", False), ("confirm", True)])
def test_what_was_measured_is_kept_where_the_trial_is_stopped(
    stops: str, has_answer: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def is_stopped(*_: object, **__: object) -> None:
        raise Stopped("SIGINT")

    monkeypatch.setattr(recommend, "bind_rank", lambda *_: None)
    monkeypatch.setattr(recommend, "join_job", lambda *_: (First(), None))
    monkeypatch.setattr(recommend, "write_on_first", lambda write, **_: write())
    monkeypatch.setattr(recommend, "plot_answer", lambda *_, **__: None)
    monkeypatch.setattr(recommend, "search", lambda *_, **__: answer_of(Choice({}, "why")))
    monkeypatch.setattr(recommend, stops, is_stopped)
    assert recommend.main(["--config", "quickstart", "--out", str(tmp_path / "out")]) == INTERRUPTED
    assert (tmp_path / "out/precision.json").exists() == has_answer
    assert ("stopped by SIGINT; not tried" in capsys.readouterr().out) == has_answer


def test_gradients_that_are_not_finite_in_fp32_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def explodes(*_: object, **__: object) -> None:
        measure([torch.tensor([math.inf])])

    monkeypatch.setattr(recommend, "count_gradients", explodes)
    with pytest.raises(TuneError, match=naming("bn_span=128: ", "lower schedule.base_lr")):
        recommend.search(load_config(["--config", "quickstart"]), First(), [128], steps=1, num_ranks=1)  # type: ignore[arg-type]


def test_config_that_is_refused_as_its_parts_are_made_is_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of more pictures in a batch than there are, which no lower rate mends."""

    def refuses(*_: object, **__: object) -> None:
        raise ConfigError("too few pictures")

    monkeypatch.setattr(recommend, "count_gradients", refuses)
    with pytest.raises(ConfigError, match=r"^too few pictures$"):
        recommend.search(load_config(["--config", "quickstart"]), First(), [128], steps=1, num_ranks=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("refuses", "is_taken"), [("optimizer.sharded=True", False), ("run.reproducible=True", False), ("run.seed=1", True)]
)
def test_wire_that_the_config_cannot_have_is_not_recommended(
    refuses: str, is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = measure([torch.rand(64) + 0.5])
    counted = Counted([found], [found], [1.0], torch.rand(64) + 0.5)
    monkeypatch.setattr(recommend, "count_gradients", lambda *_, **__: counted)
    config = load_config(["--config", "quickstart", f"--{refuses.lower()}"])
    answer = recommend.search(config, First(), [128], steps=1, num_ranks=8)  # type: ignore[arg-type]
    wire = answer.choices["wire"]
    assert bool(wire.values) == is_taken
    assert is_taken or refuses in wire.reason
    with_values(config, answer.values)


@pytest.mark.parametrize("error", [TrainingDiverged("all overflowed"), ConfigError("compute.compile needs a compiler")])
def test_choice_that_cannot_be_tried_is_kept_with_its_reason(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(recommend, "try_choice", fails)
    answer = answer_of(Choice({}, "why"))
    config = load_config(["--config", "quickstart"])
    assert recommend.confirm(answer, config, First(), steps=1).failure == str(error)  # type: ignore[arg-type]
