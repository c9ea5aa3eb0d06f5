"""How much of the code behind each record of benchmarks/results is newer than the record: make figures-age."""

import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from own_imports import ROOT, Module, house, imported_with, read_files

RESULTS = ROOT / "benchmarks/results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
COMMANDS = (*PAGES, ROOT / "Makefile", *sorted((ROOT / "benchmarks").rglob("*.py")))
"""Files with the commands that write records: pages, then the docstrings of benchmarks."""


class Age(NamedTuple):
    """A record, its oldest commit and day, the share of today's lines behind it that are newer, and its command.

    Of a script that is gone: no share, and as command the `git show` of its last version.
    """

    record: str
    commit: str
    day: str
    new_share: float | None
    command: str


def commits(found: Any) -> Iterator[str]:
    """Yield what a record names as a commit, at any depth."""
    for key, value in found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ():
        yield from [str(value)] if key == "commit" else commits(value)


def command_of(name: str, record: dict[str, Any]) -> str | None:
    """Return the command that measures a record again: its own, or the line of a page or benchmark that writes it.

    None if its script is gone.
    """
    if own := record.get("command") or "; ".join(record.get("commands", ())):
        return str(own)
    target = rf"(?:[ /]{re.escape(name)}\.json|--only {re.escape(name.partition('-')[2] or name)})"
    found = re.compile(rf"^\s*(?:\.venv/bin/|\$\(BIN\)/)?(python -m benchmarks\..*{target}(?: .*)?)$", re.M)
    lines = (line[1].partition("  #")[0] for file in COMMANDS for line in found.finditer(file.read_text()))
    return next(lines, None)


@cache
def benchmark_files() -> dict[str, Module]:
    return read_files(path for folder in ("benchmarks", "examples") for path in (ROOT / folder).rglob("*.py"))


@cache
def code_of(command: str) -> list[str]:
    """Return the files, from the root, that a benchmark, an example or a training imports."""
    found = re.search(r"-m (benchmarks\.[\w.]+)|(examples/\w+)\.py", command)
    start = str(found[1] or found[2]).replace("/", ".") if found else "bigbatch.trainer.train"
    modules = house() | benchmark_files()
    own = [name for name in imported_with(start, modules) if name in modules] if start in modules else []
    paths = [name.removeprefix("bigbatch.").replace(".", "/") for name in own]
    files = [f"{path}{end}" for path in paths for end in (".py", "/__init__.py")]
    return [file for each in files for file in (each, f"bigbatch/{each}") if (ROOT / file).is_file()]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def new_share(commit: str, files: list[str]) -> float:
    """Return the share of the files' lines that a commit did not have, by git's own comparison."""
    changed = git("diff", "--numstat", "--find-renames", "--no-textconv", commit, "--", *files).splitlines()
    added = sum(int(line.split("\t")[0]) for line in changed)
    return added / sum((ROOT / file).read_bytes().count(b"\n") for file in files)


def ages() -> list[Age]:
    """Return a row for each record, the least current first; those whose script is gone last."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        record = json.loads(path.read_text())
        command = command_of(path.stem, record)
        files = code_of(command) if command else []
        days = sorted((git("show", "-s", "--format=%cs", commit).strip(), commit) for commit in set(commits(record)))
        day, commit = days[0]
        share = new_share(commit, files) if files else None
        rows.append(Age(path.stem, commit, day, share, command or f"git show {record['script']}"))
    return sorted(rows, key=lambda row: -1.0 if row.new_share is None else row.new_share, reverse=True)


if __name__ == "__main__":
    for row in ages():
        share = "gone" if row.new_share is None else f"{row.new_share:.0%} new"
        print(f"{row.day}  {row.commit}  {share:>8}  {row.record}: {row.command}")
