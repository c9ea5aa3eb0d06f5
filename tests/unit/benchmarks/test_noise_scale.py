"""The benchmark of the noise scale: the fit against its own law, and the search of rates on known curves."""

import math
from typing import Any

import pytest
import torch

from benchmarks.largebatch import noise_scale
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
