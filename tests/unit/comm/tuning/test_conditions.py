"""Under which conditions something was measured."""

import subprocess
from pathlib import Path

import pytest

from bigbatch.comm.tuning import conditions


def test_commit_is_that_of_our_own_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel in a .venv lies inside the checkout of another project, whose commit says nothing."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *words], check=True)
    installed = tmp_path / "conditions.py"
    installed.write_text("")
    monkeypatch.setattr(conditions, "__file__", str(installed))
    monkeypatch.setattr(conditions, "BUILT_FROM", tmp_path / "built_from.txt")
    assert conditions.source_commit() is None
    conditions.BUILT_FROM.write_text("0123456789ab\n")
    assert conditions.source_commit() == "0123456789ab"
    for words in (["add", "conditions.py"], ["commit", "-q", "-m", "ours"]):
        subprocess.run([*git, *words], check=True)
    assert len(conditions.source_commit()) == 12
    installed.write_text("changed")
    assert conditions.source_commit().endswith("+")
