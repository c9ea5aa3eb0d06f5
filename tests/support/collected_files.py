"""A pytest plugin that prints the test files that are collected, and imports none of them."""

from collections.abc import Iterator
from pathlib import Path

import pytest


class NotImported(pytest.File):
    """Stands in for a test file."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield no test."""
        print(f"collected {self.path}")
        yield from ()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> NotImported:
    """Replace pytest's module, which would be imported."""
    return NotImported.from_parent(parent, path=module_path)
