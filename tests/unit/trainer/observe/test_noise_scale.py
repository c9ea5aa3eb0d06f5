"""The noise scale's figures: against closed forms, sums by hand, and how often its band holds the truth."""

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from small_run import PLAN

from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.observe.noise_recorder import NoiseRecorder
from bigbatch.trainer.report.noise_scale import FEWEST, KEPT, KIND, Moments, Share, running, student_quantile, unbiased

SMALL, LARGE = 4, 32


def test_two_batch_sizes_give_noise_and_signal() -> None:
    """E|G_b|^2 = |G|^2 + tr(Sigma) / b, with |G|^2 = 3 and tr(Sigma) = 40."""
    noise, signal = unbiased(3 + 40 / SMALL, 3 + 40 / LARGE, small_batch=SMALL, large_batch=LARGE)
    assert (noise, signal) == pytest.approx((40, 3))


def test_moments_are_weighted_sums_and_their_share_a_quotient_of_means() -> None:
    generator = np.random.default_rng(0)
    signal, square = generator.normal(1, 0.1, 40), generator.normal(4, 0.2, 40)
    moments = Moments()
    for pair in zip(signal, square, strict=True):
        moments = moments.add(*pair, kept=KEPT)
    weights = KEPT ** np.arange(39, -1, -1.0)
    share = moments.share()
    assert share is not None
    assert share.mean == pytest.approx(weights @ signal / (weights @ square))
    number = weights.sum() ** 2 / (weights**2).sum()
    assert share.num_measurements == pytest.approx(number)
    residual = signal - share.mean * square
    variance = weights @ residual**2 / weights.sum() * number / (number - 1) / number
    assert share.variance == pytest.approx(variance / (weights @ square / weights.sum()) ** 2)


def test_the_band_is_that_of_the_share() -> None:
    """At 11 measurements Student's quantile is 2.228: the share is 0.2 +- 0.1114, of a batch of 100."""
    found = Share(0.2, 0.05**2, 11).noise_scale(global_batch_size=100)
    assert found.estimate == pytest.approx(400)
    assert found.low == pytest.approx(100 * (1 / 0.3114 - 1), rel=1e-3)
    assert found.high == pytest.approx(100 * (1 / 0.0886 - 1), rel=1e-3)


def test_a_signal_that_may_be_zero_has_no_upper_bound() -> None:
    unbounded = Share(0.05, 0.05**2, 100).noise_scale(global_batch_size=10)
    assert unbounded.high is None
    assert unbounded.estimate == pytest.approx(190)
    drowned = Share(-0.01, 0.05**2, 100).noise_scale(global_batch_size=10)
    assert drowned.estimate is None
    assert 90 < drowned.low < 110
    noiseless = Share(1.01, 0.001**2, 100).noise_scale(global_batch_size=10)
    assert (noiseless.estimate, noiseless.low) == (0, 0)


def test_the_band_holds_the_truth_nineteen_times_in_twenty() -> None:
    """Gaussian gradients of 50 weights: |G|^2 = 1, tr(Sigma) = 100, so the noise scale is 100.

    Of 600 bands between 0.92 and 0.98 must hold it: three standard deviations of a share of 0.95.
    """
    generator = np.random.default_rng(1)
    mean = np.full(50, 1 / math.sqrt(50))
    held = 0
    for _ in range(600):
        gradients = mean + generator.normal(0, math.sqrt(2 / SMALL), (20, LARGE // SMALL, 50))
        small, large = (gradients**2).sum(2).mean(1), (gradients.mean(1) ** 2).sum(1)
        _, signal = unbiased(small, large, small_batch=SMALL, large_batch=LARGE)
        moments = Moments()
        for pair in zip(signal, large, strict=True):
            moments = moments.add(*pair)
        found = moments.noise_scale(global_batch_size=LARGE)
        assert found is not None
        held += found.low <= 100 <= (found.high or math.inf)
    assert 0.92 < held / 600 < 0.98


@pytest.mark.parametrize(
    ("degrees", "tabulated"), [(4, 2.776), (5, 2.571), (10, 2.228), (30, 2.042), (100, 1.984), (10**6, 1.960)]
)
def test_quantiles_are_those_of_the_tables(degrees: int, tabulated: float) -> None:
    assert student_quantile(0.975, degrees=degrees) == pytest.approx(tabulated, rel=5e-4)


def test_few_measurements_give_no_figure() -> None:
    moments = Moments()
    for number in range(FEWEST):
        assert moments.noise_scale(global_batch_size=LARGE) is None
        moments = moments.add(1.0 + number / 100, 4.0)
    assert moments.noise_scale(global_batch_size=LARGE) is not None
    records = [{"kind": KIND, "signal": 1.0 + number / 100, "global_squared_norm": 4.0} for number in range(FEWEST)]
    assert running(records[1:]).noise_scale(global_batch_size=LARGE) is None
    assert running(records).noise_scale(global_batch_size=LARGE) is not None, "of a run, too, whose figure forgets"
    assert Moments().add(0.0, 0.0).share() is None


class Told:
    """A control channel of two ranks; the first one's text is kept for the other."""

    def __init__(self) -> None:
        self.text = ""

    def tell_all(self, text: str, **_: object) -> str:
        self.text = self.text or text
        return self.text


def make_recorder(
    folder: Path = Path("none"), *, first_step: int = 20, rank: int = 0, control: Any = None
) -> NoiseRecorder:
    run = SimpleNamespace(noise_scale_every_steps=1, directory=folder, checkpoint_timeout_seconds=1.0)
    found: Any = SimpleNamespace(
        parts=SimpleNamespace(communicator=SimpleNamespace(rank=0, world_size=1)),
        communicator=SimpleNamespace(rank=rank, connection=SimpleNamespace(control=control)),
        plan=replace(PLAN, first_step=first_step, num_steps=40),
        config=SimpleNamespace(run=run, batch=SimpleNamespace(microbatch_size=SMALL)),
        log=None,
    )
    return NoiseRecorder(found)


def test_a_resumed_run_goes_on_with_what_it_measured_before(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    generator = np.random.default_rng(3)
    records = [
        {
            "kind": kind,
            "step": step,
            "signal": generator.normal(1, 0.2),
            "global_squared_norm": generator.normal(3, 0.2),
        }
        for step in range(1, 21)
        for kind in ("train", KIND)
    ]
    rundir.metrics.write_text("".join(json.dumps(record) + "\n" for record in records))
    control, found = Told(), []
    for rank in range(2):
        # another rank may not see the folder
        recorder = make_recorder(tmp_path if rank == 0 else tmp_path / "none", rank=rank, control=control)
        recorder.start(iter(()))
        found.append(recorder.summary())
    expected = running(record for record in records if record["kind"] == KIND).noise_scale(
        global_batch_size=PLAN.global_batch_size
    )
    assert expected is not None
    assert found == [expected.record()] * 2


def test_without_measurements_there_is_no_estimate() -> None:
    recorder = make_recorder(first_step=0)
    recorder.start(iter(()))  # and no exchange
    assert set(recorder.figures(1).values()) == {None}
