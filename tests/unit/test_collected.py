"""Every test file is collected by a tier of the Makefile or of .ci/run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.long
def test_every_file_is_collected_by_some_tier() -> None:
    tiers = "".join((ROOT / name).read_text() for name in ("Makefile", ".ci/run"))
    folders = sorted({*re.findall(r"pytest (?:.* )?(tests/\w+)|\$\(PYTEST\) (tests/\w+) ?(tests/\w+)?", tiers)})
    named = sorted({name for found in folders for name in found if name})
    assert "tests/unit" in named
    # the tier gpu collects all folders; only tests/gpu has no other tier
    named.append("tests/gpu")
    command = [sys.executable, "-m", "pytest", "-p", "collected_files", "--collect-only", "-s", *named]
    # with tests/openreg, which is left out where torch has no such device
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "tests/support"), "BIGBATCH_OPENREG": "", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=100)
    collected = {Path(name) for name in re.findall(r"^collected (/.+\.py)$", done.stdout, re.M)}
    assert {*ROOT.glob("tests/**/test_*.py")} - collected == set(), done.stdout[-2000:] + done.stderr[-2000:]


def test_files_with_a_test_marked_gpu_say_so_in_their_own_text() -> None:
    """By mark.gpu or DEVICES: tests/conftest.py leaves out all others if a GPU is expected."""
    others = [path for path in (ROOT / "tests").rglob("*.py") if not path.name.startswith("test_")]
    marks = [line for path in others for line in path.read_text().splitlines() if "mark.gpu" in line]
    assert {line.split(" ")[0] for line in marks} == {"DEVICES"}
