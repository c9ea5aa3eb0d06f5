"""Constraints for a container build on any base image: constraints.txt, but what the base brings stays.

usage: keep_base.py constraints.txt    run by the image's Python, which sees the base's packages; prints constraints

A base such as NVIDIA's brings a torch of its own, built for its CUDA: pip must take it or stop, never add a second one.
"""

import re
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import distributions
from pathlib import Path

BUILT_TOGETHER = ("torch", "torchvision")


def constraints(pinned: Iterable[str], present: Mapping[str, str]) -> list[str]:
    """pinned without the packages that are present, by name; of those, torch and torchvision stay at their version."""
    kept, is_kept = [], False
    for line in pinned:
        if re.match(r"[A-Za-z0-9]", line):
            is_kept = _name(line) not in present
        # a line that begins with spaces is a hash of the package above it
        if is_kept and not line.startswith("#"):
            kept.append(line.rstrip("\n"))
    return [*kept, *(f"{name}=={present[name]}" for name in BUILT_TOGETHER if name in present)]


def installed() -> dict[str, str]:
    """Name and version of every package that this Python sees; of two of a name, the one that it imports."""
    return {_name(found.metadata["Name"]): found.version for found in reversed(list(distributions()))}


def _name(requirement: str) -> str:
    """As packages are compared: lower case, with single dashes."""
    return re.sub(r"[-_.]+", "-", re.split(r"[=<>;\[\s]", requirement.strip())[0]).lower()


if __name__ == "__main__":
    print("\n".join(constraints(Path(sys.argv[1]).read_text().splitlines(), installed())))
