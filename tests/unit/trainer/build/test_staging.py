"""Staging before a run: all ranks continue together or none does, and no rank waits for a copy that has failed."""

import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from error_texts import naming
from PIL import Image

from bigbatch.comm.connect import connect
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import DataError, PeerLostError
from bigbatch.trainer import train
from bigbatch.trainer.build import job
from bigbatch.trainer.build import staging as module
from bigbatch.trainer.build.images import stage_data
from bigbatch.trainer.build.staging import using_staged
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.datasets.pack import PackRecipe, pack


def config(**data: object) -> Any:
    return load_config(["--config", "quickstart", *(f"--data.{key}={value}" for key, value in data.items())])


def packed(root: Path) -> Path:
    for split in ("train", "val"):
        (root / "set" / split / "a").mkdir(parents=True)
        Image.new("RGB", (32, 32)).save(root / "set" / split / "a" / "0.jpg")
    pack(root / "set", root / "packed", recipe=PackRecipe())
    return root / "packed"


def ranks_that(gather: Callable[[Any], list[Any]], *, rank: int = 0, local_rank: int = 0) -> Any:
    env = replace(ALONE, rank=rank, local_rank=local_rank, local_size=local_rank + 1)
    return SimpleNamespace(gather=gather, rank=rank, env=env)


def test_stage_data_does_nothing_unasked(tmp_path: Path) -> None:
    unstaged = config(root=tmp_path)
    assert stage_data(unstaged, ranks_that(lambda value: pytest.fail("a collective"))) == (unstaged, None)


def test_stage_data_puts_the_copy_in_the_place_of_the_root(tmp_path: Path) -> None:
    target = tmp_path / "local"
    staged, line = stage_data(
        config(root=packed(tmp_path), stage=target), connect(env=ALONE, backend="gloo").connection
    )
    assert staged.data.root == str(target)
    assert str(line).startswith(f"data staged in {target}: 2 images in 2 shards")
    for path in (tmp_path / "packed").rglob("*.npy"):
        assert (target / path.relative_to(tmp_path / "packed")).read_bytes() == path.read_bytes()


def test_stage_data_fails_on_all_ranks(tmp_path: Path) -> None:
    images = packed(tmp_path).with_name("set")
    with pytest.raises(DataError, match=naming("set/train: ", "bigbatch data pack")):
        stage_data(config(root=images, stage=tmp_path / "local"), connect(env=ALONE, backend="gloo").connection)
    other = {"failure": "no room on host b"}
    asked = config(root=tmp_path / "packed", stage=tmp_path / "local")
    with pytest.raises(DataError, match="no room on host b"):
        stage_data(asked, ranks_that(lambda value: [value, other]))


def answering(*others: dict[str, object]) -> Any:
    """What a second rank says, one answer an exchange."""
    answers = list(others)
    return lambda value: [value, answers.pop(0)]


DONE = {"seconds": 0.0, "summary": ""}


def test_stage_data_copies_nothing_on_other_ranks_of_a_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "stage", lambda *_, **__: pytest.fail("a second copy"))
    copied = {"seconds": 9.0, "summary": "5 GB copied"}
    under_way = {"progress": "half"}
    asked = config(root=tmp_path, stage=tmp_path / "local")
    staged, line = stage_data(asked, ranks_that(answering(under_way, copied), rank=1, local_rank=1))
    assert staged.data.root == str(tmp_path / "local")
    assert line == f"data staged in {tmp_path / 'local'}: 5 GB copied"
    with pytest.raises(DataError, match="no room"):
        stage_data(asked, ranks_that(answering(under_way, {"failure": "no room"}), rank=1, local_rank=1))


def lost(value: object) -> list[object]:
    raise PeerLostError("no answer from rank 1")


@pytest.mark.parametrize(
    ("others", "error", "words"),
    [
        (lost, PeerLostError, "no answer from rank 1"),
        (answering({"failure": "no room on host b"}), DataError, "no room on host b"),
    ],
)
def test_stage_data_ends_its_wait_with_a_lost_rank_or_the_failure_of_another_node(
    others: Any, error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Law 7: within the time in which a rank is found lost, not within that of the copy."""
    may_end, has_ended = threading.Event(), threading.Event()

    def copy(*_: object, **__: object) -> None:
        may_end.wait(200)
        has_ended.set()

    monkeypatch.setattr(module, "BEAT_SECONDS", 0.01)
    monkeypatch.setattr(module, "stage", copy)
    with pytest.raises(error, match=words):
        stage_data(config(root=tmp_path, stage=tmp_path / "local"), ranks_that(others))
    assert not has_ended.is_set()
    may_end.set()


def test_stage_data_shows_the_progress_of_a_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "LINE_SECONDS", 0.0)
    states: Any = iter([{"progress": "waiting"}, {"progress": "12.3 of 150 GB"}, DONE, DONE])
    monkeypatch.setattr(module, "_start_copy", lambda config, host: lambda: next(states))
    others = [{"progress": "nearly all"}] * 3 + [DONE]
    stage_data(config(root=tmp_path, stage=tmp_path / "local"), ranks_that(answering(*others)))
    assert capsys.readouterr().err.splitlines() == [
        *("staging: waiting", "staging: 12.3 of 150 GB", "staging: nearly all")
    ]


def test_copy_that_gets_no_byte_fails_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts as alive while bytes come, and while it waits for another process."""
    may_end, now, target, calls = threading.Event(), [0.0], tmp_path / "local", []

    def copy(source: Path, target: Path, *, on_progress: Any, on_wait: Any, **how: Any) -> None:
        calls.extend((on_progress, on_wait))
        may_end.wait(200)

    monkeypatch.setattr(module, "awake_seconds", lambda: now[0])
    monkeypatch.setattr(module, "BEAT_SECONDS", 0.0)
    monkeypatch.setattr(module, "stage", copy)
    timeout = ["--config", "quickstart", f"--data.root={tmp_path}", f"--data.stage={target}"]
    state = module._start_copy(load_config([*timeout, "--comm.timeout_seconds=100"]), "here")
    while len(calls) < 2:
        state()
    on_progress, on_wait = calls
    for number in range(6):
        now[0] += 90
        on_progress(number * 10**9, 9 * 10**9)
        assert state() == {"progress": f"{number} of 9 GB on here"}
    on_wait()
    now[0] += 1000
    assert state()["progress"].startswith(f"waiting for another process, which stages into {target}")
    on_progress(0, 9 * 10**9)
    now[0] += 110
    failure = state()["failure"]
    may_end.set()
    assert re.search(naming(f"{target}: ", f" {tmp_path} ", "comm.timeout_seconds=100", "on here"), failure)


def test_each_rank_of_a_host_holds_its_copy(tmp_path: Path) -> None:
    """Rank 0 may be lost, or end first: the others continue to read."""
    target = tmp_path / "local"
    asked = config(root=tmp_path, stage=target, keep_staged="false")
    with using_staged(asked):
        with using_staged(asked):
            (target / "train").mkdir()
            for name in ("index.json", ".staged"):
                (target / "train" / name).touch()
        assert (target / "train/index.json").exists()
    assert not (target / "train").exists()


@pytest.mark.slow
def test_a_run_removes_its_copy_if_it_is_asked_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "set_up_process", lambda communicator, **_: None)
    target, root = tmp_path / "local", packed(tmp_path)
    words = {"data.root": root, "data.stage": target, "data.keep_staged": "false", "data.num_classes": 1}
    words |= {f"batch.{name}": 1 for name in ("global_batch_size", "microbatch_size", "bn_span")}
    words |= {"data.loader": "torchvision", "data.image_size": 16, "data.probe_seconds": 0, "model.options.width": 4}
    words |= {"run.epochs": 1, "schedule.warmup_epochs": 0.5, "run.directory": tmp_path / "run"}
    assert train.main(["--config", "quickstart", *(f"--{key}={value}" for key, value in words.items())]) == 0
    assert f"data staged in {target}" in capsys.readouterr().out
    assert not (target / "train/index.json").exists()
    assert (root / "train/index.json").exists()
