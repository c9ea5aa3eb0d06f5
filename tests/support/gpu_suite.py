"""benchmarks/gpu/run.py at its small size, as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN = Path(__file__).resolve().parents[2] / "benchmarks/gpu/run.py"


def run_small(out: Path) -> tuple[dict[str, Any], str]:
    """Its record, in which all cases have figures, and what it printed."""
    command = [sys.executable, str(RUN), "--small", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=880)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("gpu-small-*.json")
    record = json.loads(path.read_text())
    assert all(each["figures"] for each in record["cases"].values())
    return record, done.stdout
