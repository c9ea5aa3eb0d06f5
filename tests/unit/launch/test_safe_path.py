"""A file in the work folder that is called as a library is not run, and own code there is found as ever."""

import subprocess
import sys
from pathlib import Path

import pytest

from bigbatch.interpreter import bigbatch_argv, python_argv
from bigbatch.launch.jobs.spec import JobSpec

LIBRARIES = ("yaml", "random", "argparse", "jsonargparse", "torch")
PLANTED = "import os\nopen('executed', 'a').write(__name__)\nraise SystemExit('planted ' + __name__)\n"
SAFE = ("PYTHONSAFEPATH", "1")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in LIBRARIES:
        (tmp_path / f"{name}.py").write_text(PLANTED)
    (tmp_path / "mine.py").write_text("import math\nNet = math.tau\n")
    return tmp_path


def run(folder: Path, *argv: str) -> str:
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert not (folder / "executed").exists()
    return done.stdout


@pytest.mark.parametrize("launcher", [(), ("launch", "local", "--ranks", "2", "--")])
def test_safe_path_libraries_are_those_that_are_installed(folder: Path, launcher: tuple[str, ...]) -> None:
    said = run(folder, sys.executable, "-m", "bigbatch", *launcher, "config", "show", "quickstart")
    assert said.count("data:\n") == (2 if launcher else 1)


@pytest.mark.long
@pytest.mark.skipif(sys.version_info < (3, 11), reason="this Python knows no safe path")
def test_safe_path_torchrun(folder: Path) -> None:
    launch = ("launch", "torchrun", "--ranks", "1", "--", "config", "show", "quickstart")
    assert "data:\n" in run(folder, sys.executable, "-m", "bigbatch", *launch)


@pytest.mark.parametrize("how", [("own.py",), ("-m", "own")])
def test_safe_path_an_own_script_finds_what_lies_beside_it(tmp_path: Path, how: tuple[str, ...]) -> None:
    (tmp_path / "mine.py").write_text("Net = 6.28\n")
    (tmp_path / "own.py").write_text("import mine\nprint(mine.Net)\n")
    assert run(tmp_path, *bigbatch_argv(), "launch", "local", "--python", "--", *how) == "6.28\n"


def test_safe_path_an_own_class_is_found_by_its_dotted_name(folder: Path) -> None:
    """The work folder comes after installed packages; no planted library is imported for the class or its imports."""
    find = "from bigbatch.trainer.config.dotted import import_owner as find\n"
    found = run(folder, *python_argv(), "-c", find + "print(find('mine.Net')[0].Net)")
    assert found.startswith("6.28")
    missing = find + "try: find('gone.Net')\nexcept ValueError as error: print(error)"
    assert "PYTHONPATH" in run(folder, *python_argv(), "-c", missing)


def test_safe_path_is_set_for_all_ranks_of_ours_alone() -> None:
    assert SAFE in JobSpec(("train",), 1).variables
    assert JobSpec(("own.py",), 1, is_python=True).variables == ()
    stated = JobSpec(("train",), 1, environment=(("PYTHONSAFEPATH", ""),))
    assert dict(stated.variables)["PYTHONSAFEPATH"] == "", "unless the job says so"
