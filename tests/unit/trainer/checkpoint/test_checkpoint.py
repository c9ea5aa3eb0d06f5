"""Checkpoints: whole or not there, kept and dropped by rule, verified, loaded without executing code."""

import io
import json
import math
import os
import pathlib
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event
from typing import BinaryIO

import pytest
import torch
from error_texts import naming
from silent_ranks import hurry_count
from thread_controls import on_ranks

from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.errors import CheckpointError, UserError
from bigbatch.trainer.checkpoint import checkpoint as module
from bigbatch.trainer.checkpoint.checkpoint import (
    best_checkpoint,
    list_checkpoints,
    load_checkpoint,
    require_free_disk,
    restoring,
    save_checkpoint,
    set_aside_after,
)
from bigbatch.trainer.folder.ownership import write_on_first


def save(folder: Path, step: int, top1: float | None = None, *, keep: int = 2, **more: str) -> Path:
    state = {"step": step, "model": {"w": torch.arange(5.0) * step}, "config": "a: 1", **more}
    return save_checkpoint(folder, state, step=step, top1=top1, keep=keep)


def test_checkpoint_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step, top1 in ((1, 0.5), (2, 0.9), (3, None), (4, 0.7), (5, 0.6)):
        save(tmp_path, step, top1)
    assert [c.step for c in list_checkpoints(tmp_path)] == [2, 4, 5]
    assert best_checkpoint(list_checkpoints(tmp_path)).step == 2
    save(tmp_path, 6, 0.9)
    assert best_checkpoint(list_checkpoints(tmp_path)).step == 6, "the newest among equals"
    assert best_checkpoint([]) is None


def test_best_checkpoint_compares_no_two_validation_sets(tmp_path: Path) -> None:
    """Checkpoints of unknown sets (None) count. The best of each set is kept: the run may go back to that set."""
    for step, top1, val in ((1, 0.3, None), (2, 0.9, "one"), (3, 0.5, "two"), (4, 0.4, "two"), (5, 0.2, "two")):
        save(tmp_path, step, top1, keep=1, **({} if val is None else {"val_samples": val}))
    assert [c.step for c in list_checkpoints(tmp_path)] == [1, 2, 3, 5]
    assert best_checkpoint(list_checkpoints(tmp_path)).step == 3
    save(tmp_path, 6, 0.1, val_samples="one")
    assert best_checkpoint(list_checkpoints(tmp_path)).step == 2


def damage_size(path: Path) -> None:
    os.truncate(path / "state.pt", (path / "state.pt").stat().st_size // 2)


def damage_bytes(path: Path) -> None:
    content = bytearray((path / "state.pt").read_bytes())
    content[len(content) // 2] ^= 1
    (path / "state.pt").write_bytes(content)


def damage_manifest(path: Path) -> None:
    (path / "manifest.json").write_text("{")


def lose_state(path: Path) -> None:
    (path / "state.pt").unlink()


def lose_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def other_format(path: Path) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (damage_size, "truncated"),
        (damage_bytes, "checksum"),
        (damage_manifest, "readable: "),
        (lose_state, "readable: "),
        (lose_manifest, "readable: "),
        (other_format, "format 99"),
    ],
)
def test_checkpoint_damage_is_found_and_an_intact_one_is_named(damage, reason: str, tmp_path: Path) -> None:
    intact, damaged = save(tmp_path, 1), save(tmp_path, 2)
    damage(damaged)
    with pytest.raises(CheckpointError, match=naming(damaged, reason)) as caught:
        load_checkpoint(damaged)
    assert "\n" not in str(caught.value)
    if damage is not other_format:
        assert str(caught.value).endswith(f"; another one is {intact}")
        shutil.rmtree(intact)
        with pytest.raises(CheckpointError, match=naming(damaged, reason, "no other one")):
            load_checkpoint(damaged)


class Harmful:
    """Would run a command when unpickled."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self):
        return os.mkdir, (str(self.witness),)


def test_checkpoint_loading_executes_no_code(tmp_path: Path) -> None:
    witness = tmp_path / "witness"
    path = save_checkpoint(tmp_path / "c", {"step": 1, "evil": Harmful(witness)}, step=1, top1=None, keep=1)
    with pytest.raises(CheckpointError, match=naming(path, "readable: ")):
        load_checkpoint(path)
    assert not witness.exists()


def test_checkpoint_unfinished_and_foreign_folders_are_not_listed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    for name in (".step-00000002.77", "step-00000002.bak", "step-old"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    (tmp_path / "step-old" / "manifest.json").unlink()
    assert [c.step for c in list_checkpoints(tmp_path)] == [1]


@pytest.mark.parametrize("changed", [{"step": math.inf}, {"top1": "0.5 or so"}, {"top1": 10**400}, {"step": None}])
def test_checkpoint_whose_manifest_is_damaged_is_listed_by_its_step_alone(
    changed: dict[str, object], tmp_path: Path
) -> None:
    for step in (1, 2):
        save(tmp_path, step, 0.5)
    manifest = tmp_path / "step-00000001/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | changed))
    assert [(c.step, c.top1) for c in list_checkpoints(tmp_path)] == [(1, None), (2, 0.5)]


# --- writes that are cut short ---


def count_steps(monkeypatch: pytest.MonkeyPatch, *, die_before: int | None) -> list[str]:
    """Name each change of the disk before it is made, and end this process without a word before one of them."""
    done: list[str] = []

    def step(name: str) -> None:
        if len(done) == die_before:
            os._exit(99)
        done.append(name)

    def stepping(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def stepped(*arguments: object, **options: object) -> object:
            step(name)
            return call(*arguments, **options)

        return stepped

    def save_in_pieces(state: object, file: BinaryIO) -> None:
        whole = io.BytesIO()
        torch_save(state, whole)
        for piece in (whole.getvalue()[:100], whole.getvalue()[100:]):
            step("write")
            file.write(piece)
            file.flush()

    torch_save = torch.save
    monkeypatch.setattr(module.torch, "save", save_in_pieces)
    monkeypatch.setattr(module, "create_file", stepping("create", module.create_file))
    for name in ("mkdir", "rename", "unlink", "rmdir", "fsync"):
        counted = stepping(name, getattr(os, name))
        monkeypatch.setattr(os, name, counted)
        if sys.version_info < (3, 11) and name != "fsync":  # its pathlib has taken them as it was imported
            monkeypatch.setattr(pathlib._normal_accessor, name, counted)
    monkeypatch.setattr(Path, "write_text", stepping("write manifest", Path.write_text))
    return done


def in_a_fork(work: Callable[[], object]) -> int:
    """The exit code of a process that does it."""
    process = os.fork()
    if process == 0:
        try:
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def test_checkpoint_is_there_whole_wherever_its_writing_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 2 is written without its accuracy, then with it, in place of step 1; one is kept."""

    def save_both(folder: Path, told: Path) -> None:
        for top1 in (None, 0.5):
            save(folder, 2, top1, keep=1)
            told.write_bytes(str(top1).encode())

    def begun(name: str) -> Path:
        folder = tmp_path / name
        save(folder, 1, keep=1)
        return folder

    def cut_short(folder: Path, *, die_before: int | None) -> tuple[int, list[str]]:
        with monkeypatch.context() as patch:
            steps = count_steps(patch, die_before=die_before)
            if die_before is None:
                save_both(folder, tmp_path / "told")
                return 0, steps
            return in_a_fork(lambda: save_both(folder, tmp_path / "told")), steps

    _, steps = cut_short(begun("whole"), die_before=None)
    assert len(steps) > 20
    assert steps.count("rename") == 3, "step 2 first takes its name, then is replaced"
    for number in range(len(steps)):
        (tmp_path / "told").unlink()
        (tmp_path / "told").write_bytes(b"")
        folder = begun(str(number))
        assert cut_short(folder, die_before=number)[0] == 99
        newest = list_checkpoints(folder)[-1]
        told = (tmp_path / "told").read_bytes()
        where = f"killed before {steps[number]}, number {number}"
        assert load_checkpoint(newest.path)["step"] == newest.step >= (2 if told else 1), where
        assert newest.top1 == 0.5 or told != b"0.5", where
        save(folder, 3, keep=1)
        left = {p.name for p in folder.iterdir()}
        assert left in ({"step-00000003"}, {"step-00000002", "step-00000003"}), where


def test_checkpoint_is_on_disk_before_it_takes_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut after a rename would else leave the name with nothing behind it."""
    save(tmp_path, 1)
    flushed: list[Path] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{descriptor}").resolve())
        fsync(descriptor)

    def require_flushed() -> None:
        (aside,) = tmp_path.glob(".step-*")
        assert {aside / "state.pt", aside / "manifest.json", aside} == set(flushed)

    monkeypatch.setattr(os, "fsync", note)
    save_checkpoint(tmp_path, {"step": 1}, step=1, top1=0.5, keep=1, before_naming=require_flushed)
    assert flushed[-1] == tmp_path


@pytest.mark.parametrize(
    "error", [RuntimeError("size\nmismatch"), ValueError("names"), KeyError("model"), TypeError("seed")]
)
def test_checkpoint_state_that_does_not_fit_is_one_line(error: Exception) -> None:
    with pytest.raises(CheckpointError, match=r"^checkpoint a/b .* model or optimizer: .*$"), restoring(Path("a/b")):
        raise error
    with pytest.raises(CheckpointError, match=r"^a/b has other classes$"), restoring(Path("a/b")):
        raise CheckpointError("a/b has other classes")


def test_checkpoint_disk_that_cannot_hold_a_run_is_refused(tmp_path: Path) -> None:
    require_free_disk(tmp_path / "new", num_bytes=1)
    with pytest.raises(CheckpointError, match=naming(tmp_path, "1000000000000 MB", "run.directory")):
        require_free_disk(tmp_path, num_bytes=10**18)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=naming(tmp_path / "file/run", "Not a directory", "run.directory")):
        require_free_disk(tmp_path / "file" / "run", num_bytes=1)


def test_checkpoint_later_checkpoints_are_set_aside_not_lost(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=9)
    (tmp_path / ".step-00000003.replaced").mkdir()  # what a killed write left does not stand in for it
    aside = set_aside_after(tmp_path, step=1)
    assert [c.step for c in list_checkpoints(tmp_path)] == [1]
    assert [load_checkpoint(path)["step"] for path in aside] == [2, 3]


# --- ranks that wait for the one that writes ---


def ranks_that_write(write: Callable[[Event], None], *, limit: float, sum_seconds: float = 60) -> list[str]:
    """Return the errors of two ranks; rank 0 writes, and learns when rank 1 has ended.

    limit: seconds for the write; sum_seconds: for every other exchange.
    """
    ended = Event()

    def run(control: JobControl) -> str:
        control.timeout_seconds = sum_seconds
        try:
            write_on_first(lambda: write(ended), control, what="checkpoint of step 3", timeout_seconds=limit)
            return ""
        except (UserError, MemoryError) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            if control.rank == 1:
                ended.set()

    return on_ranks(2, run)


def test_checkpoint_may_take_longer_than_a_sum() -> None:
    written: list[int] = []

    def write(ended: Event) -> None:
        time.sleep(0.6)
        written.append(3)

    assert ranks_that_write(write, limit=60, sum_seconds=0.2) == ["", ""]
    assert written == [3], "by the first rank alone"


def test_checkpoint_that_does_not_end_names_itself_and_the_limit_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry_count(monkeypatch)

    def hang(ended: Event) -> None:
        ended.wait(timeout=200)

    _, waiting = ranks_that_write(hang, limit=0.7)
    lost = naming("PeerLostError", "rank 1", "checkpoint of step 3", "no answer from rank 0 on node0")
    assert re.search(lost, waiting), waiting
    assert float(re.findall(r"after ([\d.]+) s", waiting)[0]) >= 0.7


def test_checkpoint_with_an_unexpected_error_names_its_rank_to_the_others() -> None:
    """The text of a defect alone does not say on which rank it was."""

    def write(ended: Event) -> None:
        raise MemoryError

    told = "PeerLostError: rank 1: checkpoint of step 3 failed; no answer from rank 0 on node0, which met MemoryError"
    assert ranks_that_write(write, limit=60) == ["MemoryError: ", told]
