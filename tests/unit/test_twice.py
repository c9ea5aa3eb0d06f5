"""`.ci/twice`: what fails once and passes alone is named, what fails twice is red."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TWICE = Path(__file__).parents[2] / ".ci/twice"
PASSES_LATER = """
from pathlib import Path
def test_unsteady():
    mark = Path(__file__).with_suffix(".ran")
    ran_before = mark.exists()
    mark.touch()
    assert ran_before
"""
MANY = """
import pytest
@pytest.mark.parametrize("k", range(4))
def test_many(k, request):
    mark = request.path.with_suffix(f".ran{k}")
    ran_before = mark.exists()
    mark.touch()
    assert ran_before
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "code", "named"),
    [
        (PASSES_LATER, 0, "test_it.py::test_unsteady\n"),
        pytest.param("def test_broken():\n    assert 0", 1, "", marks=pytest.mark.long),
        (MANY, 1, ""),
        pytest.param("import nothing_of_this_name", 2, "", marks=pytest.mark.long),
    ],
    ids=["unsteady", "broken", "many", "no tests"],
)
def test_a_few_that_failed_run_again(text: str, code: int, named: str, tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(text)
    unsteady = tmp_path / "unsteady"
    unsteady.touch()
    argv = [str(TWICE), "--rootdir", str(tmp_path), "-c", os.devnull, str(tmp_path)]
    environ = os.environ | {"PYTHON": sys.executable, "UNSTEADY": str(unsteady)}
    done = subprocess.run(argv, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert unsteady.read_text() == named
