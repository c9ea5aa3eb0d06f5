"""What CI makes of the vulnerabilities that are known of pinned packages: .ci/audit.py."""

import runpy
from pathlib import Path
from typing import Any

import pytest

verdict = runpy.run_path(str(Path(__file__).parents[2] / ".ci/audit.py"))["verdict"]
SOUND = {"name": "torch", "version": "2.14.1", "vulns": []}
HOLED = {"name": "pillow", "version": "10.0.0", "vulns": [{"id": "PYSEC-2023-175", "fix_versions": ["10.0.1"]}]}
UNMENDED = {"name": "six", "version": "1.17.0", "vulns": [{"id": "PYSEC-2026-1", "fix_versions": []}]}
MISSED = {"name": "numpy", "skip_reason": "Dependency not found on PyPI and could not be audited: numpy (2.4.6)"}


@pytest.mark.parametrize(
    ("dependencies", "code", "named"),
    [
        ([SOUND], 0, ["1 packages"]),
        ([SOUND, HOLED], 1, ["pillow 10.0.0", "PYSEC-2023-175", "10.0.1"]),
        ([UNMENDED, MISSED], 1, ["six 1.17.0", "PYSEC-2026-1", "no version"]),
        ([SOUND, MISSED], 77, ["cannot be had", "1 packages", "numpy"]),
        ([], 77, ["cannot be had", "any package"]),
    ],
    ids=[
        "none is known",
        "one is known",
        "one is known, others are not looked up",
        "one is not looked up",
        "no network",
    ],
)
def test_audit_fails_by_what_is_known_and_passes_by_nothing_less_than_all(
    dependencies: list[dict[str, Any]], code: int, named: list[str]
) -> None:
    given, lines = verdict(dependencies)
    assert given == code
    assert all(word in "\n".join(lines) for word in named), lines
