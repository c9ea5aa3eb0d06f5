"""What lowered_gpu.py counts of regions for an H200, by a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
IS_PINNED = f"\ntorch=={torch.__version__.partition('+')[0]} " in (ROOT / "constraints.txt").read_text()
"""Whether this is the torch that the numbers are of."""
REGION_SECONDS = 280


def lowered(*words: str, num_regions: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Return region -> counts. words: those of lowered_gpu.py; folder: an empty one, for the compilers' caches."""
    environ = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder)}
    command = [sys.executable, str(ROOT / "tests/support/lowered_gpu.py"), *words]
    limit = REGION_SECONDS * num_regions
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environ)
    assert done.returncode == 0, done.stderr[-2000:]
    return {row.pop("region"): row for row in map(json.loads, done.stdout.splitlines())}
