"""Under which conditions something was measured."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from bigbatch.comm.tuning import commit, conditions


def test_commit_is_that_of_our_own_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel in a .venv lies inside the checkout of another project, whose commit says nothing."""
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "theirs"]):
        subprocess.run([*git, *words], check=True)
    installed = tmp_path / "commit.py"
    installed.write_text("")
    monkeypatch.setattr(commit, "__file__", str(installed))
    monkeypatch.setattr(commit, "BUILT_FROM", tmp_path / "built_from.txt")
    assert commit.source_commit() is None
    commit.BUILT_FROM.write_text("0123456789ab\n")
    assert commit.source_commit() == "0123456789ab"
    for words in (["add", "commit.py"], ["commit", "-q", "-m", "ours"]):
        subprocess.run([*git, *words], check=True)
    assert len(commit.source_commit()) == 12
    installed.write_text("changed")
    assert commit.source_commit().endswith("+")


def test_nccl_is_the_one_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image may carry another one than torch was built with (build argument NCCL_VERSION)."""

    class Library:
        @staticmethod
        def ncclGetVersion(number: Any) -> None:
            number._obj.value = 23004

    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 7))
    monkeypatch.setattr(conditions.ctypes, "CDLL", lambda name: Library)
    assert conditions.nccl_version() == "2.30.4"

    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(conditions.ctypes, "CDLL", missing)
    assert conditions.nccl_version() == "2.30.7"
