"""benchmarks/gpu on a real GPU, at its small size: CUDA graphs, NCCL and the compiler take part."""

from pathlib import Path

import pytest
from gpu_suite import run_small


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.timeout(900)
def test_cases_all_run_on_a_gpu(tmp_path: Path) -> None:
    record, _ = run_small(tmp_path)
    assert {"cuda", "cudnn", "driver", "power_limit"} <= set(record["cases"]["steps"]["conditions"])
