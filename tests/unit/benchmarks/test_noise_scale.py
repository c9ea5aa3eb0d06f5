"""The benchmark of the noise scale: the fit against its own law, and the search of rates on known curves."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.largebatch import noise_cost, noise_scale
from benchmarks.largebatch.noise_scale import Outcome, Task, fit, summary, tuned_rate

SIZES = [8, 32, 128, 512]
TASK = Task(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64), 1.0)


def test_the_fit_finds_the_law_that_made_the_steps() -> None:
    found = fit(SIZES, [160 * (1 + 100 / size) for size in SIZES])
    assert found["critical_batch"] == pytest.approx(100, rel=0.01)
    assert found["fewest_steps"] == pytest.approx(160, rel=0.01)
    assert found["rms_error"] < 0.01


def test_the_band_is_of_resampled_seeds() -> None:
    rows: list[dict[str, Any]] = [
        {
            "global_batch_size": size,
            "steps_of_seeds": [factor * 160 * (1 + 100 / size) for factor in (0.9, 1.0, 1.1)],
            "reached": 3,
            noise_scale.SCALES: [120.0, None, 80.0],
        }
        for size in SIZES
    ]
    found = summary(rows)
    critical = found["critical_batch_by_steps"]
    assert critical["low"] < 100 < critical["high"]
    assert critical["critical_batch"] == pytest.approx(100, rel=0.01)
    assert found["noise_scale_by_batch"]["32"] == 120, "one that is not bounded counts as the largest"


@pytest.mark.parametrize("best", [-7, -1, 0, 3])
def test_the_rate_with_the_fewest_steps_is_found_from_either_side(best: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def train(task: Task, *, batch: int, lr: float, seed: int, cap: float) -> Outcome:
        place = round(2 * math.log2(lr / 0.02))
        steps = 1000 + 100 * abs(place - best)
        seen.append(place)
        # far above the best it diverges, and what is slower than the best so far is cut off
        return Outcome(steps if place < best + 4 and steps <= cap else None)

    monkeypatch.setattr(noise_scale, "train", train)
    assert tuned_rate(TASK, batch=32, start=0.02) == pytest.approx(0.02 * 2 ** (best / 2))
    assert len(seen) == len(set(seen)), "each rate once"


@pytest.mark.slow
def test_the_cost_of_a_measurement_is_of_steps_that_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []
    monkeypatch.setattr(noise_cost.GradientNoise, "take", lambda self: measured.append(len(self._steps)))
    sizes = ("--models", "resnet18", "--microbatch", "2", "--image-size", "8", "--turns", "1")
    monkeypatch.setattr("sys.argv", ["noise_cost", *sizes, "--out", str(tmp_path / "cost.json")])
    noise_cost.main()
    (row,) = json.loads((tmp_path / "cost.json").read_text())["rows"]
    assert (row["num_parameters"], row["global_batch_size"], row["ratio"]["n"]) == (11_181_642, 4, 1)
    assert sorted(measured) == [0] * 3 + [1, 2, 3], "turns that do not count are two"


@pytest.mark.parametrize("option", ["--microbatch", "--image-size", "--turns"])
def test_a_cost_of_nothing_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        noise_cost.parse([option, "0"])
    assert f"{option}=0: give at least 1" in capsys.readouterr().err
