"""Staging before a run: all ranks go on together, or none does, and nobody waits for a copy in vain."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from bigbatch.comm.backends.base import PeerLostError
from bigbatch.comm.connection import connect
from bigbatch.comm.environ import ProcessEnv
from bigbatch.trainer import stage_data as module
from bigbatch.trainer.config_file import load_config
from bigbatch.trainer.data.pack import pack
from bigbatch.trainer.data.shard_writer import Recipe
from bigbatch.trainer.errors import DataError
from bigbatch.trainer.stage_data import stage_data

ALONE = ProcessEnv("none", 0, 1, 0, 1, "here", None)


def config(**data: object) -> Any:
    return load_config(["--config", "quickstart", *(f"--data.{key}={value}" for key, value in data.items())])


def packed(root: Path) -> Path:
    for split in ("train", "val"):
        (root / "set" / split / "a").mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(root / "set" / split / "a" / "0.jpg")
    pack(root / "set", root / "packed", recipe=Recipe())
    return root / "packed"


def ranks_that(gather_text: Callable[[str], list[str]]) -> Any:
    return SimpleNamespace(gather_text=gather_text)


def test_nothing_is_staged_unasked(tmp_path: Path) -> None:
    unstaged = config(root=tmp_path)
    assert stage_data(unstaged, ranks_that(lambda text: pytest.fail("a collective"))) == (unstaged, None)


def test_copy_takes_the_place_of_the_root(tmp_path: Path) -> None:
    target = tmp_path / "local"
    staged, line = stage_data(config(root=packed(tmp_path), stage=target), connect(env=ALONE, backend="gloo"))
    assert staged.data.root == str(target)
    assert str(line).startswith(f"data staged in {target}: 2 pictures in 2 shards")
    for path in (tmp_path / "packed").rglob("*.npy"):
        assert (target / path.relative_to(tmp_path / "packed")).read_bytes() == path.read_bytes()


def test_line_is_of_the_rank_that_copied(tmp_path: Path) -> None:
    other = json.dumps({"seconds": 99.0, "summary": "5 GB copied"})
    asked = config(root=packed(tmp_path), stage=tmp_path / "local")
    _, line = stage_data(asked, ranks_that(lambda text: [text, other]))
    assert line == f"data staged in {tmp_path / 'local'}: 5 GB copied"


def test_failure_is_that_of_all_ranks(tmp_path: Path) -> None:
    pictures = packed(tmp_path).with_name("set")
    with pytest.raises(DataError, match="set/train: is not packed"):
        stage_data(config(root=pictures, stage=tmp_path / "local"), connect(env=ALONE, backend="gloo"))
    other = json.dumps({"failure": "no room on host b"})
    asked = config(root=tmp_path / "packed", stage=tmp_path / "local")
    with pytest.raises(DataError, match="no room on host b"):
        stage_data(asked, ranks_that(lambda text: [text, other]))


def test_defect_is_not_taken_for_bad_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(module, "stage", broken)
    with pytest.raises(ZeroDivisionError):
        stage_data(config(root=tmp_path, stage=tmp_path / "local"), connect(env=ALONE, backend="gloo"))


def test_lost_rank_ends_the_wait_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 7: within the time in which it is found lost, not within that of the copy."""
    may_end, has_ended = threading.Event(), threading.Event()

    def lost(text: str) -> list[str]:
        raise PeerLostError("no answer from rank 1")

    def copy(*_: object, **__: object) -> None:
        may_end.wait(10)
        has_ended.set()

    monkeypatch.setattr(module, "stage", copy)
    with pytest.raises(PeerLostError):
        stage_data(config(root=tmp_path, stage=tmp_path / "local"), ranks_that(lost))
    assert not has_ended.is_set()
    may_end.set()
