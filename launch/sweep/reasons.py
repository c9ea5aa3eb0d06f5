"""Why a point failed, in one line."""

import re
from pathlib import Path

OUT_OF_MEMORY = re.compile(
    r"out of memory|not enough memory|can't allocate memory|OutOfMemory|MemoryError|oom.kill", re.I
)
TAIL_BYTES = 100_000
KILLED = 137


def find_reason(log: Path, *, exit_code: int | None) -> str:
    """Out of what a job printed, and its exit code (None where a scheduler keeps it)."""
    lines = _last_lines(log)
    for line in lines:
        if OUT_OF_MEMORY.search(line):
            return f"out of memory: {_shorten(line)}"
    if exit_code == KILLED:
        return "killed, most likely by the kernel, out of memory"
    ours = [line.partition("bigbatch: ")[2] for line in lines if "bigbatch: " in line]
    if ours:
        return _shorten(ours[-1])
    ended = "the job ended" if exit_code is None else f"exit code {exit_code}"
    return f"{ended}: {_shorten(lines[-1])}" if lines else f"{ended}, and printed nothing"


def _last_lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.strip() for line in text.splitlines() if line.strip()]


def _shorten(line: str, limit: int = 300) -> str:
    return line if len(line) <= limit else line[: limit - 3] + "..."
