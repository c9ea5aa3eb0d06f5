"""Settings of torch's compiler that a prototype measures: torch knows them, and the code for an H200 is as stated."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered_regions import IS_PINNED, lowered
from torch.utils._triton import has_triton_package

from benchmarks.gpu.prototypes.common import compiled_as_today
from benchmarks.gpu.prototypes.settings import BYTES, LAUNCHES, SETTINGS, SIDE, WIDTH


@pytest.mark.slow
def test_unknown_settings_are_refused() -> None:
    for unknown in ({"coordinate_descent": True}, {"combo_kernels": "yes"}):
        with pytest.raises(RuntimeError, match="Unexpected"):
            compiled_as_today(lambda: None, torch.device("cpu"), **unknown)


@pytest.mark.weekly
@pytest.mark.parametrize("settings", [{}, *SETTINGS.values()], ids=["none", *SETTINGS])
@pytest.mark.skipif(not has_triton_package(), reason="Triton is not installed")
@pytest.mark.skipif(not IS_PINNED, reason="the numbers are those of the pinned torch")
def test_code_for_a_gpu_has_these_launches_and_bytes(settings: Mapping[str, Any], tmp_path: Path) -> None:
    words = [f"{name}={int(value)}" for name, value in settings.items()]
    row = lowered("ghosts=1", *words, "layer1.1", num_regions=1, folder=tmp_path)["layer1.1"]
    both = [row["forward"], row["backward"]]
    assert sum(way["launches"] for way in both) == LAUNCHES
    elements = 256 * 4 * WIDTH * SIDE**2
    assert sum(way["gb"] for way in both) * 1e9 / elements == pytest.approx(BYTES, rel=1e-3)
