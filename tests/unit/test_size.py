"""The project stays easy to follow: what a reader meets behind a module, and in a run, has upper limits (decision 049).

A change that exceeds a limit removes something else, or raises the limit and says why in its commit.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from own_imports import ROOT, loaded_with

from bigbatch.cli import COMMANDS
from bigbatch.groups import GROUPS
from bigbatch.trainer.config.schema import KEYS

FOLDERS = ("bigbatch", "comm", "trainer", "launch", "tools", "experiments")
LOADED = {
    "bigbatch.trainer.train": (102, 15_960),
    "bigbatch.trainer.step.loop": (27, 3_995),
    "bigbatch.comm.gradients.reducer": (14, 1_780),
    "bigbatch.trainer.optim.lars": (3, 520),
}
"""Module -> most files, and their lines, that importing it loads."""
LOADED_BY_RUN = (114, 18_270)
"""The same for a whole quick start, with the parts that its config names."""
ENTERED = {"start": (100, 5_600), "step": (35, 1_150)}
"""Most files, and lines of functions, that a run on one rank enters: until its first forward, and in later steps."""
MAX_FRAMES = 9
"""Most frames of ours from main() to the forward of the model."""
MAX_LINES, MAX_MODULE_LINES = 68_160, 400


def modules(folder: str) -> list[Path]:
    """The Python files of a folder; bigbatch's links lead to the other folders."""
    return [*(ROOT / folder).glob("*.py")] if folder == "bigbatch" else [*(ROOT / folder).rglob("*.py")]


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


@pytest.mark.parametrize("module", LOADED)
def test_module_loads_at_most_so_much(module: str) -> None:
    num_files, lines = loaded_with(module)
    assert (num_files <= LOADED[module][0], lines <= LOADED[module][1]) == (True, True), (num_files, lines)
    assert lines > 400, "files were not found"


@pytest.mark.long
def test_run_enters_at_most_so_much(tmp_path: Path) -> None:
    """The quick start on one rank, on its own images."""
    bigbatch = [sys.executable, "-m", "bigbatch", "data", "generate", str(tmp_path / "data")]
    subprocess.run(bigbatch, check=True, capture_output=True)
    traced = [sys.executable, str(ROOT / "tests/support/traced_run.py"), str(tmp_path / "data"), str(tmp_path / "run")]
    found = json.loads(subprocess.run(traced, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    for phase, (max_files, max_lines) in ENTERED.items():
        assert 20 < found[phase]["files"] <= max_files, found
        assert found[phase]["lines"] <= max_lines, found
    assert 5 < found["frames"] <= MAX_FRAMES, found
    assert (found["loaded"]["files"] <= LOADED_BY_RUN[0], found["loaded"]["lines"] <= LOADED_BY_RUN[1]) == (True, True)


def test_product_has_at_most_its_lines() -> None:
    lines = sum(num_lines(path) for folder in FOLDERS for path in modules(folder))
    assert 10_000 < lines <= MAX_LINES


def test_modules_are_short() -> None:
    paths = [path for folder in FOLDERS for path in modules(folder)]
    assert [f"{path}: {num_lines(path)}" for path in paths if num_lines(path) > MAX_MODULE_LINES] == []


def test_config_keys_commands_and_pages_are_few() -> None:
    in_groups = sum(len(group.commands) for group in GROUPS.values())
    of_data = 5  # generate, prepare, check, pack, stage
    assert len(KEYS) <= 127
    assert len(COMMANDS) - len(GROUPS) - 1 + in_groups + of_data <= 30
    assert len([*(ROOT / "docs").glob("*.md")]) <= 36
