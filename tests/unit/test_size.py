"""The project stays small: lines, modules, config keys, commands and pages have upper limits (decision 049).

A change that exceeds a limit removes something else, or raises the limit and says why in its commit.
"""

from pathlib import Path

from bigbatch.cli import COMMANDS
from bigbatch.groups import GROUPS
from bigbatch.trainer.config.schema import KEYS

ROOT = Path(__file__).resolve().parents[2]
LINES = {
    "bigbatch": 1_600,
    "comm": 13_450,
    "trainer": 33_550,
    "launch": 9_450,
    "experiments": 4_400,
    "benchmarks": 9_000,
}
"""Upper limits of the lines of each folder's Python files."""
MAX_MODULE_LINES = 400


def modules(folder: str) -> list[Path]:
    """The Python files of a folder; bigbatch's links lead to the other folders."""
    return [*(ROOT / folder).glob("*.py")] if folder == "bigbatch" else [*(ROOT / folder).rglob("*.py")]


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def test_folders_have_at_most_their_lines() -> None:
    found = {folder: sum(map(num_lines, modules(folder))) for folder in LINES}
    assert {folder: lines for folder, lines in found.items() if lines > LINES[folder]} == {}
    assert min(found.values()) > 1_000, "no files were found"


def test_modules_are_short() -> None:
    paths = [path for folder in LINES if folder != "benchmarks" for path in modules(folder)]
    assert [f"{path}: {num_lines(path)}" for path in paths if num_lines(path) > MAX_MODULE_LINES] == []


def test_config_keys_commands_and_pages_are_few() -> None:
    in_groups = sum(len(group.commands) for group in GROUPS.values())
    of_data = 5  # generate, prepare, check, pack, stage
    assert len(KEYS) <= 120
    assert len(COMMANDS) - len(GROUPS) - 1 + in_groups + of_data <= 30
    assert len([*(ROOT / "docs").glob("*.md")]) <= 34
