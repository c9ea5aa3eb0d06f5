"""Copies of a run's state in nodes' memory: which one a run goes on from, and what is refused."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from thread_controls import on_ranks

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import connect
from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import CheckpointError
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.run import memory_copies
from bigbatch.trainer.run.checkpoint import STATE_FILE, save_checkpoint
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.run.memory_copies import MemoryCopies, open_copies
from bigbatch.trainer.run.resume import find_start


@pytest.fixture
def communicator() -> Iterator[Communicator]:
    with connect(env=ALONE) as alone:
        yield alone


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def config_of(run: Path, **settings: object) -> Config:
    stated = {"directory": run, "memory_every_steps": 1, **settings}
    return load_config(["--config", "quickstart", *(f"--run.{key}={value}" for key, value in stated.items())])


def opened(tmp_path: Path, communicator: Communicator, **settings: object) -> MemoryCopies:
    copies = open_copies(config_of(tmp_path / "run", **settings), communicator, memory=tmp_path / "memory")
    assert copies
    copies.require_room(num_bytes=0)
    return copies


def state_of(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((3,), float(step))}


def keep(copies: MemoryCopies, *, step: int) -> None:
    copies.keep(state_of(step), step=step, is_agreed=True)
    copies.settle()


def test_copies_are_none_unless_asked_for(tmp_path: Path, communicator: Communicator) -> None:
    assert open_copies(config_of(tmp_path, memory_every_steps=0), communicator) is None
    assert not list(tmp_path.iterdir())


def test_copies_give_the_newest_to_the_next_start(tmp_path: Path, memory: Path, communicator: Communicator) -> None:
    first = opened(tmp_path, communicator)
    for step in (3, 4):
        keep(first, step=step)
    assert len(list(memory.glob("*/*/step-*"))) == 1, "one is kept"
    found = opened(tmp_path, communicator).find(above=3)
    assert found
    assert (found.state["step"], found.host) == (4, ALONE.host)
    assert torch.equal(found.state["weights"], torch.full((3,), 4.0))
    assert opened(tmp_path, communicator).find(above=4) is None, "a checkpoint of that step is as good"
    opened(tmp_path, communicator).drop()
    assert not list(memory.iterdir())


def test_copies_that_are_damaged_are_passed_over(
    tmp_path: Path, memory: Path, communicator: Communicator, capsys: pytest.CaptureFixture[str]
) -> None:
    copies = opened(tmp_path, communicator)
    keep(copies, step=9)
    (folder,) = memory.iterdir()
    save_checkpoint(folder / "other-host", state_of(7), step=7, top1=None, keep=1)  # hosts may share a memory
    (newest,) = folder.glob(f"*/step-00000009/{STATE_FILE}")
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    found = copies.find(above=0)
    assert found
    assert found.state["step"] == 7
    assert "step-00000009 is damaged" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["resume", "removed"])
def test_copies_of_a_run_that_begins_elsewhere_are_dropped(
    how: str, tmp_path: Path, memory: Path, communicator: Communicator
) -> None:
    keep(opened(tmp_path, communicator), step=5)
    if how == "removed":
        RunDir(tmp_path / "run").memory_name.unlink()
    anew = opened(tmp_path, communicator, resume="auto" if how == "removed" else tmp_path / "step-2")
    assert anew.find(above=0) is None
    assert not list(memory.glob("*/*/step-*"))


@pytest.mark.parametrize("mode", [0o755, 0o770])
def test_copies_do_not_lie_where_others_could_put_theirs(
    mode: int, tmp_path: Path, memory: Path, communicator: Communicator
) -> None:
    copies = opened(tmp_path, communicator)
    keep(copies, step=5)
    (folder,) = memory.iterdir()
    folder.chmod(mode)
    assert copies.find(above=0) is None
    with pytest.raises(CheckpointError, match=naming("run.memory_every_steps", str(folder), "alone")):
        copies.require_room(num_bytes=0)


@pytest.mark.parametrize(("left", "text"), [(299_000_000, "has 299 MB of memory"), (0, "has 0 MB of memory")])
def test_copies_that_do_not_fit_are_refused(
    left: int, text: str, tmp_path: Path, memory: Path, communicator: Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = opened(tmp_path, communicator)
    monkeypatch.setattr(memory_copies, "free_memory", lambda: left)
    with pytest.raises(CheckpointError, match=naming("run.memory_every_steps", ALONE.host, text, "300 MB")):
        copies.require_room(num_bytes=100_000_000)
    monkeypatch.setattr(memory_copies, "free_memory", lambda: 300_000_000)
    copies.require_room(num_bytes=100_000_000)


def test_copies_end_where_others_took_the_memory_meanwhile(
    tmp_path: Path,
    memory: Path,
    communicator: Communicator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one line: the run goes on, and what is kept already stays."""
    copies = opened(tmp_path, communicator)
    copies.require_room(num_bytes=1_000_000)
    keep(copies, step=5)
    monkeypatch.setattr(memory_copies, "free_memory", lambda: 1_999_999)
    keep(copies, step=6)
    keep(copies, step=7)
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "keeps no copy of the run in memory any more: 2 MB are left, and the next copy takes 2 MB" in said
    found = opened(tmp_path, communicator).find(above=0)
    assert found
    assert found.state["step"] == 5


def test_copies_whose_folder_was_removed_meanwhile_are_made_anew(
    tmp_path: Path, memory: Path, communicator: Communicator
) -> None:
    copies = opened(tmp_path, communicator)
    keep(copies, step=5)
    (folder,) = memory.iterdir()
    shutil.rmtree(folder)
    keep(copies, step=6)
    found = opened(tmp_path, communicator).find(above=0)
    assert found
    assert found.state["step"] == 6


def test_copies_stand_in_for_checkpoints_that_are_all_damaged(
    tmp_path: Path, memory: Path, communicator: Communicator
) -> None:
    config, rundir = config_of(tmp_path / "run"), RunDir(tmp_path / "run")
    copies = opened(tmp_path, communicator)
    state = {"config": dump_config(config), "step": 6}
    copies.keep(state, step=6, is_agreed=True)
    copies.settle()
    path = save_checkpoint(rundir.checkpoints, {**state, "step": 8}, step=8, top1=None, keep=9)
    (path / STATE_FILE).write_bytes(b"damaged")
    start, _ = find_start(config, rundir, samples=None, control=communicator.control, copies=copies)
    assert (start.step, start.kept_by, list(start.damaged)) == (6, ALONE.host, [path])
    copies.drop()
    with pytest.raises(CheckpointError, match=naming("step-00000008", "none of 1 checkpoints is intact")):
        find_start(config, rundir, samples=None, control=communicator.control, copies=opened(tmp_path, communicator))


def test_copies_are_found_alike_by_ranks_that_list_other_checkpoints(tmp_path: Path) -> None:
    """As where nodes share no disk, or a listing comes late: rank 0 lists step 100, rank 1 none."""
    folder = tmp_path / "copies"
    folder.mkdir(mode=0o700)
    save_checkpoint(folder / "node0", state_of(50), step=50, top1=None, keep=1)

    def find(control: Control) -> object:
        topology = SimpleNamespace(leaders=(0,))
        alike: Any = SimpleNamespace(rank=control.rank, world_size=2, control=control, topology=topology, env=ALONE)
        return MemoryCopies(folder, alike).find(above=100 if control.rank == 0 else 0)

    assert on_ranks(2, find) == [None, None]


def test_copies_go_on_without_once_one_fails(
    tmp_path: Path,
    memory: Path,
    communicator: Communicator,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    copies = opened(tmp_path, communicator)

    def fail(*_: Any, **__: Any) -> None:
        raise CheckpointError("no space left")

    monkeypatch.setattr(memory_copies, "save_checkpoint", fail)
    for step in (1, 2, 3):
        keep(copies, step=step)
    said = capsys.readouterr().err
    assert said.count("no space left") == said.count("\n") == 1


def test_copies_newer_than_the_checkpoints_are_where_a_run_starts(
    tmp_path: Path, memory: Path, communicator: Communicator
) -> None:
    config, rundir = config_of(tmp_path / "run"), RunDir(tmp_path / "run")
    copies = opened(tmp_path, communicator)
    state = {"config": dump_config(config), "evaluations": [{"step": 4, "top1": 0.5}], "gradient_order": "a\nb"}
    copies.keep({**state, "step": 6}, step=6, is_agreed=True)
    copies.settle()
    for step, expected, host in ((4, 6, ALONE.host), (6, 6, ""), (8, 8, "")):
        save_checkpoint(rundir.checkpoints, {**state, "step": step}, step=step, top1=0.5, keep=9)
        start, _ = find_start(config, rundir, samples=None, control=communicator.control, copies=copies)
        assert (start.step, start.kept_by, start.owes_evaluation) == (expected, host, False)
        assert list(start.evaluations) == [4]
