"""benchmarks/gpu on a real GPU, at its small size: CUDA graphs, NCCL and the compiler take part."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_cases_run_on_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/gpu/run.py"), "--small", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("gpu-small-*.json")
    record = json.loads(path.read_text())
    assert all(each["figures"] for each in record["cases"].values())
    assert {"cuda", "cudnn", "driver", "power_limit"} <= set(record["cases"]["steps"]["conditions"])
