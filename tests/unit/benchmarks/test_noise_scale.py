"""The benchmark of the noise scale: the fit against its own law, and the search of rates on known curves."""

import json
from pathlib import Path

import pytest

from benchmarks.largebatch import noise_cost
from benchmarks.largebatch.noise_scale import fit

SIZES = [8, 32, 128, 512]


def test_the_fit_finds_the_law_that_made_the_steps() -> None:
    found = fit(SIZES, [160 * (1 + 100 / size) for size in SIZES])
    assert found["critical_batch"] == pytest.approx(100, rel=0.01)
    assert found["fewest_steps"] == pytest.approx(160, rel=0.01)
    assert found["rms_error"] < 0.01


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
