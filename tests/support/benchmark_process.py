"""Starts a benchmark or a page's code as the page says, wherever the test's folder is."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

from forked_ranks import exit_codes, start_rank

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


def fork_benchmark(module: str, *options: object, cwd: Path, timeout_seconds: float) -> tuple[int | None, str]:
    """Run one to its end in a process forked with torch imported, which costs it more than its own work when small.

    Its working folder is cwd, where its output stays. Returns its exit code and output; None: it had no end in time.
    """
    return _fork("live_as_module", f"benchmarks.{module}", *map(str, options), cwd=cwd, timeout_seconds=timeout_seconds)


def fork_code(code: str, *, cwd: Path, timeout_seconds: float) -> tuple[int | None, str]:
    """Run Python code as `python -c` does in cwd, forked and ended as fork_benchmark does it."""
    return _fork("live_as_code", code, cwd=cwd, timeout_seconds=timeout_seconds)


def fork_fresh_code(code: str, *arguments: str, cwd: Path, timeout_seconds: float) -> tuple[int | None, str]:
    """Run Python code as fork_code does, with arguments, in a process that has loaded no module of bigbatch."""
    return _fork("live_as_fresh_code", code, *arguments, cwd=cwd, timeout_seconds=timeout_seconds)


def _fork(function: str, *words: str, cwd: Path, timeout_seconds: float) -> tuple[int | None, str]:
    log, target = cwd / "output.txt", f"benchmark_process:{function}"
    environ = from_checkout()
    process = start_rank(target, (str(cwd), *words), environ=environ, stdout=log, stderr=log, has_children=True)
    codes = exit_codes([process], timeout_seconds=timeout_seconds)
    return codes[0] if codes else None, log.read_text()


def live_as_module(cwd: str, module: str, *options: str) -> int:
    """What `python -m MODULE OPTIONS` does in cwd."""
    _enter(cwd)
    sys.argv = ["-m", *options]  # runpy sets the first
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def live_as_fresh_code(cwd: str, code: str, *arguments: str) -> int:
    """What `python -c CODE ARGUMENTS` does in cwd: the code loads the modules of bigbatch that it needs."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "bigbatch"]:
        del sys.modules[name]
    return live_as_code(cwd, code, *arguments)


def live_as_code(cwd: str, code: str, *arguments: str) -> int:
    """What `python -c CODE ARGUMENTS` does in cwd."""
    _enter(cwd)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    return 0


def _enter(cwd: str) -> None:
    """Have cwd, and Python's path of a new process there."""
    os.chdir(cwd)
    sys.path = [cwd, str(ROOT), *(path for path in sys.path if not Path(path).resolve().is_relative_to(ROOT / "tests"))]
