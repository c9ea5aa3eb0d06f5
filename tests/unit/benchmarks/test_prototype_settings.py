"""Settings of torch's compiler that a prototype measures: torch knows them, and the code for an H200 is as stated."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._triton import has_triton_package

from benchmarks.gpu.prototypes.common import compiled_as_today
from benchmarks.gpu.prototypes.settings import BYTES, LAUNCHES, SETTINGS, SIDE, WIDTH

ROOT = Path(__file__).parents[3]
IS_PINNED = f"\ntorch=={torch.__version__.partition('+')[0]} " in (ROOT / "constraints.txt").read_text()


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
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path)}
    words = [f"{name}={int(value)}" for name, value in settings.items()]
    command = [sys.executable, str(ROOT / "tests/support/lowered_gpu.py"), "ghosts=1", *words, "layer1.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environ)
    assert done.returncode == 0, done.stderr[-2000:]
    row = json.loads(done.stdout)
    both = [row["forward"], row["backward"]]
    assert sum(way["launches"] for way in both) == LAUNCHES
    elements = 256 * 4 * WIDTH * SIDE**2
    assert sum(way["gb"] for way in both) * 1e9 / elements == pytest.approx(BYTES, rel=1e-3)
