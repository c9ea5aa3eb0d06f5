"""benchmarks.gpu.day at its small size, as a user runs it."""

import json
import tempfile
from pathlib import Path
from typing import Any

from benchmark_process import fork_benchmark


def run_small(out: Path) -> tuple[dict[str, Any], str]:
    """Return its record, in which each part has figures or a reason, and its output."""
    options = ("--small", "--minutes", 25, "--out", out, "--logs", out / "logs")
    folder = Path(tempfile.mkdtemp(dir=out))
    code, told = fork_benchmark("gpu.day", *options, cwd=folder, timeout_seconds=1700)
    assert code == 0, told
    (path,) = out.glob("gpu-small-*.json")
    return json.loads(path.read_text()), told
