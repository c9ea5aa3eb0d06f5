"""The recommended batch: closed forms of the critical batch and of its trade, and the command on real runs."""

import json
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from error_texts import naming
from tiny_training import TINY_OPTIONS, bigbatch

from bigbatch.errors import ConfigError, RunFolderError, TuneError
from bigbatch.experiments.batch import recommend
from bigbatch.experiments.batch.critical import (
    MAX_SEGMENTS,
    Pair,
    batch_costs,
    critical_batch,
    is_in_doubt,
    recommended,
    segments,
    thirds,
)
from bigbatch.experiments.batch.report import Answer, explain
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.folder.folder import RunDir, read_records
from bigbatch.trainer.report.noise_scale import KIND, NoiseScale, running

BATCH = 512
"""That of the quick start, in microbatches of 128."""


def pairs_of(noise_scales: Sequence[float], *, spread: float = 0.02, drop: float = 1.0) -> list[Pair]:
    """A measurement for each: square 1, or less as the run continues, and the share of signal of that noise scale."""
    generator = np.random.default_rng(0)
    found = []
    for number, scale in enumerate(noise_scales):
        square = drop**number
        share = 1 / (1 + scale / BATCH) + generator.normal(0, spread)
        found.append((share * square, square))
    return found


def test_a_noise_scale_that_grows_is_averaged_over_progress_and_not_over_gradients() -> None:
    """Half the steps at 100, half at 3,000: E_min / S_min = sum(B p) / sum(p), with p = 1 / (1 + B / 512).

    The later gradients are much shorter, and count no less for that.
    """
    scales = np.array([100.0] * 200 + [3000.0] * 200)
    progress = 1 / (1 + scales / BATCH)
    expected = (scales * progress).sum() / progress.sum()
    found = critical_batch(segments(pairs_of(scales, spread=1e-3, drop=0.97)), global_batch_size=BATCH)
    assert found.estimate == pytest.approx(expected, rel=0.01)
    early, _, late = thirds(pairs_of(scales, spread=1e-3, drop=0.97), global_batch_size=BATCH)
    assert (early.estimate, late.estimate) == pytest.approx((100, 3000), rel=0.05)


def test_segments_are_even_and_few() -> None:
    assert len(segments(pairs_of([100.0] * 39))) == 1
    assert [share.num_measurements for share in segments(pairs_of([100.0] * 60))] == [20, 20, 20]
    assert len(segments(pairs_of([100.0] * 4000))) == MAX_SEGMENTS
    # of 11, 13 and 14 the middle alone would be long enough for a figure, and be taken for the early one
    counts = {number: len(thirds(pairs_of([100.0] * number), global_batch_size=BATCH)) for number in range(5, 20)}
    assert counts == {number: 3 if number >= 15 else 0 for number in range(5, 20)}


def test_the_trade_is_one_plus_a_quotient() -> None:
    """S / S_min = 1 + B_crit / B and E / E_min = 1 + B / B_crit, so both are 2 at the critical batch."""
    rows = {row.global_batch_size: (row.steps, row.images) for row in batch_costs(1000, microbatch_size=128, own=500)}
    assert set(rows) == {128, 256, 500, 512, 1024, 2048, 4096, 8192}
    assert rows[500] == pytest.approx((3, 1.5))
    assert rows[1024] == pytest.approx((1 + 1000 / 1024, 1 + 1024 / 1000))
    assert min(row.global_batch_size for row in batch_costs(10, microbatch_size=128, own=256)) == 128


def test_the_nearest_doubled_microbatch_is_recommended() -> None:
    found = {critical: recommended(critical, microbatch_size=32) for critical in (0, 20, 45, 46, 1000, 1500)}
    assert found == {0: 32, 20: 32, 45: 32, 46: 64, 1000: 1024, 1500: 2048}


def test_no_batch_above_the_training_set_is_recommended() -> None:
    capped = {most: recommended(5000, microbatch_size=128, num_train=most) for most in (100, 1000, 1024, 10**9)}
    assert capped == {100: 128, 1000: 512, 1024: 1024, 10**9: 4096}
    assert max(row.global_batch_size for row in batch_costs(5000, microbatch_size=128, own=512, num_train=1000)) == 512
    pairs = pairs_of([5000.0] * 200)
    answer = Answer(pairs, run=Path("r"), global_batch_size=BATCH, microbatch_size=128, num_train=1000)
    assert (answer.recommended, answer.record()["training_images"]) == (512, 1000)
    assert "larger than the training set of 1000 images" in "\n".join(explain(answer))
    roomy = Answer(pairs, run=Path("r"), global_batch_size=BATCH, microbatch_size=128, num_train=60_000)
    assert "training set" not in "\n".join(explain(roomy))


def test_size_of_the_training_set_is_that_of_the_last_start() -> None:
    starts = [{"kind": "start", "job": {"train_samples": count}} for count in (10, 500, "x", True, -1)]
    odd = [{"kind": "start"}, {"kind": "start", "job": []}, {"kind": "train", "job": {"train_samples": 7}}]
    assert recommend.num_train([*starts, *odd]) == 500
    assert recommend.num_train(odd) is None


@pytest.mark.parametrize(
    ("found", "in_doubt"),
    [
        (NoiseScale(100, 60, 200), False),
        (NoiseScale(100, 40, 200), True),
        (NoiseScale(100, 40, None), True),
        (NoiseScale(None, 40, None), True),
    ],
)
def test_a_wide_band_is_in_doubt(found: NoiseScale, in_doubt: bool) -> None:
    assert is_in_doubt(found) is in_doubt


def test_the_answer_is_clear_and_says_what_is_not_known() -> None:
    answer = Answer(pairs_of([1000.0] * 200), run=Path("runs/a b"), global_batch_size=BATCH, microbatch_size=128)
    text = "\n".join(explain(answer))
    assert answer.recommended == 1024
    assert "recommended: a global batch of 1024, --batch.global_batch_size 1024" in text
    assert "for SGD" in text
    assert "in doubt" not in text
    assert [line.split()[-1] for line in text.splitlines() if line.strip().startswith("512 ")] == ["run's"]
    drowned = Answer(
        pairs_of([1e9] * 200, spread=0.3), run=Path("runs/a b"), global_batch_size=BATCH, microbatch_size=128
    )
    text = "\n".join(explain(drowned))
    assert "in doubt, as the band is wide" in text
    assert shlex.split(text.rpartition("batch: ")[2])[:4] == ["bigbatch", "tune", "batch", "runs/a b"]


def test_a_signal_that_drowned_recommends_nothing() -> None:
    pairs = [(-abs(signal) / 100, square) for signal, square in pairs_of([1e9] * 100, spread=0.3)]
    answer = Answer(pairs, run=Path("r"), global_batch_size=BATCH, microbatch_size=128)
    assert (answer.recommended, answer.rate_factor, answer.rows) == (None, None, [])
    assert answer.record()["critical_batch"] is None
    assert "critical batch above " in next(explain(answer))


def make_run(folder: Path, pairs: Sequence[Pair]) -> RunDir:
    run = RunDir(folder)
    run.write_text(run.config, dump_config(load_config(["--config", "quickstart"])))
    records = [{"kind": KIND, "signal": signal, "global_squared_norm": square} for signal, square in pairs]
    run.write_text(run.metrics, "".join(json.dumps(record) + "\n" for record in records))
    return run


@pytest.mark.slow
def test_a_run_is_read_and_its_answer_left_beside_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", pairs_of([1000.0] * 200))
    assert recommend.main([str(run.path)]) == 0
    found = json.loads((run.path / "batch.json").read_text())
    assert found["recommended_batch"] == 1024
    assert found["critical_batch_low"] < found["critical_batch"] < found["critical_batch_high"]
    assert {row["global_batch_size"]: row["steps"] for row in found["batches"]}[512] == pytest.approx(
        1 + found["critical_batch"] / 512
    )
    assert (run.path / "batch.png").exists()
    assert "recommended: a global batch of 1024" in capsys.readouterr().out


def test_answer_is_told_where_it_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder of another user's run can only be read."""
    run = make_run(tmp_path / "run", pairs_of([1000.0] * 200))
    (run.path / "batch.json").mkdir()  # root can write into any folder
    with pytest.raises(RunFolderError, match=naming("batch.json: Is a directory")):
        recommend.main([str(run.path)])
    told = capsys.readouterr().out
    assert "recommended: a global batch of 1024" in told
    assert "left in" not in told


def test_measurements_that_no_run_can_have_made_are_left_out(tmp_path: Path) -> None:
    pairs = pairs_of([1000.0] * 10)
    run = make_run(tmp_path / "run", pairs)
    expected = recommend.read_answer(run)
    signals = ['"x"', "null", "[1]", "{}", "true", "NaN", "-Infinity", "1e400", "1e308", "1" + 400 * "0"]
    odd = [f'{{"kind": "{KIND}", "signal": {signal}, "global_squared_norm": 1}}' for signal in signals]
    odd += [f'{{"kind": "{KIND}", "signal": 1, "global_squared_norm": {square}}}' for square in [*signals, -1]]
    with run.metrics.open("a") as file:
        file.write("\n".join([*odd, f'{{"kind": "{KIND}"}}']) + "\n")
    assert recommend.read_answer(run) == expected
    whole = ({"kind": KIND, "signal": signal, "global_squared_norm": square} for signal, square in pairs)
    assert running(read_records(run.metrics)) == running(whole)


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        (["{run}"], RunFolderError, ("has no noise scale", "--run.noise_scale_every_steps 1", "bigbatch tune batch")),
        (["{few}"], TuneError, ("has 4 measurements", "5 are needed")),
        (["{flat}"], TuneError, ("gradients of zero", "check its loss")),
        (["quickstart"], RunFolderError, ("quickstart is not a run folder", "--epochs N --out FOLDER")),
        (["quickstart", "--epochs", "2"], ConfigError, ("--epochs and --out go together",)),
        (["{run}", "--run.seed=1"], ConfigError, ("--run.seed=1", "--epochs N --out FOLDER")),
        (["{run}", "--launch", "mpirun --ranks 2"], ConfigError, ("--launch", "cannot be changed")),
        (
            ["quickstart", "--epochs", "2", "--out", "{none}", "--launch", "a 'b"],
            ConfigError,
            ("--launch", "quotation"),
        ),
        (["quickstart", "--epochs", "0", "--out", "{none}"], ConfigError, ("--epochs 0",)),
        (
            ["quickstart", "--epochs", "1", "--out", "{none}", "--batch.microbatch_size=512"],
            ConfigError,
            ("run.noise_scale_every_steps=1", "set batch.microbatch_size"),
        ),
    ],
)
def test_tune_batch_refuses(
    options: Sequence[str], error: type[Exception], named: tuple[str, ...], tmp_path: Path
) -> None:
    make_run(tmp_path / "run", [])
    make_run(tmp_path / "few", pairs_of([100.0] * 4))
    make_run(tmp_path / "flat", [(0.0, 0.0)] * 6)
    places = {name: str(tmp_path / name) for name in ("run", "few", "flat", "none")}
    with pytest.raises(error, match=naming(*named)):
        recommend.main([option.format(**places) for option in options])


def test_tune_batch_passes_on_what_asks_it_to_stop(tmp_path: Path) -> None:
    """A training does not outlive its command, and says by 130 that it stopped, which is the command's code, too."""
    answer = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(130))"
    code, told = stop_the_training(signal.SIGUSR1, answer=answer, mark=tmp_path / "mark")
    assert (code, told) == (130, "\nbigbatch: asking all ranks to save a checkpoint and stop\n")


def test_training_that_was_stopped_before_it_could_answer_has_not_failed(tmp_path: Path) -> None:
    """It is stopped while it imports torch."""
    code, told = stop_the_training(signal.SIGTERM, answer="", mark=tmp_path / "mark")
    assert (code, told) == (130, "\nbigbatch: asking all ranks to save a checkpoint and stop\n")


def stop_the_training(number: signal.Signals, *, answer: str, mark: Path) -> tuple[int, str]:
    """Signal the command while its child runs, which answers so; return its exit code and its output."""
    child = f"import pathlib, signal, sys, time\n{answer}\npathlib.Path({str(mark)!r}).touch()\n"
    child += "for _ in range(600): time.sleep(0.1)"  # what comes just before a sleep is answered after it
    command = "import sys; from bigbatch.experiments.batch import recommend; sys.exit(recommend._train(sys.argv[1:]))"
    words = [sys.executable, "-c", command, sys.executable, "-c", child]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    while not mark.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(number)
    _, told = process.communicate(timeout=50)
    return process.returncode, told


@pytest.mark.long
def test_tune_batch_trains_a_short_run_that_measures(tmp_path: Path) -> None:
    smaller = ["--batch.microbatch_size=4", "--batch.bn_span=4"]  # the noise needs two microbatches of each rank
    words = ["tune", "batch", "quickstart", "--epochs", "2", "--launch", "mpirun --ranks 2", *TINY_OPTIONS, *smaller]
    done = bigbatch(*words, "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "out/batch.json").read_text())
    assert (found["measurements"], found["global_batch_size"], found["microbatch_size"]) == (8, 16, 4)
    assert "critical batch " in done.stdout
    failed = bigbatch(*words, "--out", str(tmp_path / "other"), "--schedule.base_lr=1e30")
    assert failed.returncode == 1
    assert "the training ended with exit code" in failed.stderr
