"""Every part can be removed: the rest still trains, and naming the part ends with one line."""

import json
import subprocess
import sys

import pytest
from own_imports import ROOT


@pytest.mark.long
@pytest.mark.timeout(600)
def test_quick_start_trains_without_any_one_part_and_refuses_it_by_name() -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/removed_parts.py")], capture_output=True, text=True, check=True
    )
    found = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(found) >= 35, "the tables were not read"
    assert [each for each in found if each["trains"] != 0] == []
    named = [each for each in found if "naming" in each]
    assert len(named) >= 18
    refusals = ("is missing from this installation", "is not one of")
    lines = [each["line"].splitlines() for each in named]
    odd = [
        (each["naming"], each["code"], line)
        for each, line in zip(named, lines, strict=True)
        if each["code"] not in (1, 2) or len(line) != 1 or not any(refusal in line[0] for refusal in refusals)
    ]
    assert odd == []
