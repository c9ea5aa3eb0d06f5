"""Starts a benchmark as its page says, `python -m benchmarks...`, wherever the test's folder is."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def benchmark_command(module: str, *options: object) -> list[str]:
    """Name the words of `python -m benchmarks.MODULE OPTIONS`."""
    return [sys.executable, "-m", f"benchmarks.{module}", *map(str, options)]


def from_checkout() -> dict[str, str]:
    """Copy this process's environment, with the checkout ahead of what it has for Python's path."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def run_benchmark(module: str, *options: object, **settings: Any) -> "subprocess.CompletedProcess[str]":
    """Run one to its end, its output kept; settings are those of subprocess.run."""
    how = {"capture_output": True, "text": True, "timeout": 200, "check": False, "env": from_checkout()}
    return subprocess.run(benchmark_command(module, *options), **(how | settings))
