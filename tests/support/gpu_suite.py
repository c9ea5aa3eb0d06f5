"""benchmarks.gpu.run at its small size, as a user runs it."""

import json
from pathlib import Path
from typing import Any

from benchmark_process import run_benchmark


def run_small(out: Path) -> tuple[dict[str, Any], str]:
    """Its record, in which all cases have figures, and what it printed."""
    done = run_benchmark("gpu.run", "--small", "--out", out, timeout=880)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("gpu-small-*.json")
    record = json.loads(path.read_text())
    assert all(each["figures"] for each in record["cases"].values())
    return record, done.stdout
