"""Find the reason of a job's failure in its output."""

import re

from bigbatch.errors import FOLLOWS

OUT_OF_MEMORY = re.compile(
    r"out of memory|not enough memory|can't allocate memory|OutOfMemory|MemoryError|oom.kill", re.I
)
KILLED = 137
TIME_IS_OVER = "DUE TO TIME LIMIT"
"""Slurm's messages before it ends a job."""
DATED = re.compile(
    r"^bigbatch: (\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (.*)|^slurmstepd\S*: .* AT (\d{4}-\d\d-\d\dT[\d:]+) ", re.A
)
"""Lines of a job's own script, and of Slurm when it ends a job."""


def find_reason(text: str, *, exit_code: int | None) -> str:
    """Return the reason from a job's output and exit code (None if only the scheduler knows it)."""
    lines = _lines(text)
    for line in lines:
        if OUT_OF_MEMORY.search(line):
            return f"out of memory: {_shorten(line.rpartition('out of memory: ')[2])}"
    if any(TIME_IS_OVER in line for line in lines):
        return "took longer than its time limit, and was ended"
    if exit_code == KILLED:
        return "killed, most likely by the kernel, out of memory"
    ours = [line.partition("bigbatch: ")[2] for line in lines if "bigbatch: " in line and not DATED.match(line)]
    if ours:
        causes = [line for line in ours if not FOLLOWS.search(line)]
        return _shorten((causes or ours)[-1])
    ended = "the job ended" if exit_code is None else f"exit code {exit_code}"
    return f"{ended}: {_shorten(lines[-1])}" if lines else f"{ended}, and printed nothing"


def has_failed(text: str) -> bool:
    """Return whether the last line of a job's script says so."""
    ends = [line for line in _lines(text) if DATED.match(line) and "ended with exit code" in line]
    return bool(ends) and not ends[-1].endswith(" 0")


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]


def _shorten(line: str, limit: int = 300) -> str:
    return line if len(line) <= limit else line[: limit - 3] + "..."
