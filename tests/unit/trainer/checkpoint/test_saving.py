"""Checkpoints written during training: their content, the notice when they are on disk, and failures."""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from owned_folder import owning
from small_run import make_parts
from thread_controls import on_ranks
from torch import nn

from bigbatch import errors
from bigbatch.comm.rendezvous.job_control import JobControl
from bigbatch.comm.rendezvous.topology import Topology
from bigbatch.errors import CheckpointError, RunFolderError, TrainingDiverged
from bigbatch.trainer.build.optimizer import make_native
from bigbatch.trainer.checkpoint import saving
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, save_checkpoint
from bigbatch.trainer.checkpoint.saving import CheckpointSaver, Saved, copy_to_host
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.folder import owner
from bigbatch.trainer.step.plan import Parts

LONG_SECONDS = 60.0
"""Longer than any wait of a slow machine."""


# --- the copy ---


def test_copy_is_as_the_state_was_whatever_becomes_of_it() -> None:
    flat_N = torch.arange(6.0)
    weight = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
    state = {
        "model": {"a": flat_N[:4].view(2, 2), "b": flat_N[2:], "none": torch.empty(0), "w": weight},
        "optimizer": {"state": {0: {"step": torch.tensor(3), "old": deque([flat_N])}}, "groups": [{"betas": (0.9, 1)}]},
        "other": OrderedDict(x=flat_N),
        "step": 3,
    }
    expected = {"a": [[0.0, 1.0], [2.0, 3.0]], "b": [2.0, 3.0, 4.0, 5.0]}
    weight_before = weight.detach().clone()
    copied = copy_to_host(state)
    with torch.no_grad():
        flat_N.fill_(-1)
        weight.fill_(-1)
    state["optimizer"]["groups"][0]["betas"] = None  # type: ignore[index]
    model, optimizer = copied["model"], copied["optimizer"]
    assert {name: model[name].tolist() for name in expected} == expected
    assert model["none"].numel() == 0
    assert torch.equal(model["w"], weight_before)
    assert model["w"].stride() == weight.stride()
    assert optimizer["state"][0]["step"] == 3
    assert [each.tolist() for each in optimizer["state"][0]["old"]] == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]
    assert copied["other"]["x"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert (optimizer["groups"], copied["step"]) == ([{"betas": (0.9, 1)}], 3)


def test_copy_takes_no_more_memory_than_the_state() -> None:
    flat_N = torch.zeros(1000)
    copied = copy_to_host([flat_N[:500], flat_N[500:], flat_N])
    assert len({each.untyped_storage().data_ptr() for each in copied}) == 1
    assert copied[0].untyped_storage().nbytes() == 4000


# --- several ranks; the first one writes ---


class Storage:
    """A disk that takes its time: what is to be written is written when it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.goes_on = Event(), Event()
        monkeypatch.setattr(saving, "save_checkpoint", self._save)

    def _save(self, *arguments: Any, **settings: Any) -> Path:
        self.begun.set()
        assert self.goes_on.wait(LONG_SECONDS)
        return save_checkpoint(*arguments, **settings)


@pytest.fixture
def storage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Storage]:
    slow = Storage(monkeypatch)
    yield slow
    slow.goes_on.set()


def make_saver(
    folder: Path, *, parts: Parts | None = None, held: owner.Owner | None = None, limit: float = LONG_SECONDS
) -> CheckpointSaver:
    settings = {"run.directory": folder, "run.compare_every_steps": 0, "run.checkpoint_timeout_seconds": limit}
    config = load_config(["--config", "quickstart", *(f"--{key}={value}" for key, value in settings.items())])
    parts = parts or make_parts()
    return CheckpointSaver(config, parts, parts.communicator, owner=held, digests={"samples": None})  # type: ignore[arg-type]


def start(saver: CheckpointSaver, *, done: int) -> None:
    saver.start(done=done, top1=None, evaluations=[], skipped={})


@pytest.mark.parametrize("name", ["lamb", "adamw"])
def test_optimizer_that_will_never_update_a_weight_again_is_not_saved(name: str, tmp_path: Path) -> None:
    """A gradient of 1e25 is finite, and its square is not: the update is 0 from then on, while the loss looks well."""
    settings = load_config(
        ["--config", "quickstart", f"--optimizer.name={name}", "--optimizer.options.eps=1e-6"]
    ).optimizer
    parts = make_parts()
    weights = list(parts.precision.masters.values())
    parts = replace(parts, optimizer=make_native(settings, [{"params": weights, "weight_decay": 0.0}], lr=0.1))
    saver = make_saver(tmp_path, parts=parts)
    for weight in weights:
        weight.grad = torch.full_like(weight, 1.0)
    parts.optimizer.step()
    start(saver, done=1)
    assert saver.collect(wait=True)
    weights[0].grad = torch.full_like(weights[0], 1e25)
    parts.optimizer.step()
    assert parts.precision.all_finite([parts.precision.masters])
    with pytest.raises(TrainingDiverged, match=naming("step 2", "state of the optimizer", "optimizer.clip_norm")):
        start(saver, done=2)
    assert steps(tmp_path) == [1]


def test_running_statistics_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    """A loss over the batch's own statistics can be finite, while each evaluation is not."""
    parts = make_parts()
    parts.statistics.running_N[-1] = torch.nan
    with pytest.raises(TrainingDiverged, match=naming("step 2", "running statistics", "schedule.base_lr")):
        start(make_saver(tmp_path, parts=parts), done=2)
    assert steps(tmp_path) == []


def steps(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in list_checkpoints(folder / "checkpoints")]


def on_two_ranks(job: Callable[[CheckpointSaver, int], Any], folder: Path, *, limit: float = LONG_SECONDS) -> list[Any]:
    """What a job returns on each of two ranks, which are threads; or the words of the CheckpointError that ends it."""
    parts = make_parts()

    def run(control: JobControl) -> Any:
        rank = control.rank
        communicator: Any = SimpleNamespace(
            rank=rank,
            world_size=2,
            connection=SimpleNamespace(control=control, topology=Topology(rank, ((0, 1),))),
            algorithm="doubling",
            transport=parts.communicator.transport,
        )
        try:
            return job(make_saver(folder, parts=replace(parts, communicator=communicator), limit=limit), rank)
        except CheckpointError as error:
            return str(error)

    return on_ranks(2, run)


def save_third(
    saver: CheckpointSaver, rank: int, *, wait: bool, on_start: Callable[[Any], object] = lambda write: None
) -> None:
    start(saver, done=3)
    on_start(saver._write)
    while saver.collect(wait=wait) is None:
        pass


def test_saving_tells_all_ranks_of_a_checkpoint_once_it_is_on_disk(tmp_path: Path, storage: Storage) -> None:
    def job(saver: CheckpointSaver, rank: int) -> list[Saved | None]:
        assert saver.collect(wait=True) is None, "there is none"
        start(saver, done=3)
        told = [saver.collect(wait=False), saver.collect(wait=False)]
        if rank == 0:
            assert steps(tmp_path) == []
            storage.goes_on.set()
        return [*told, saver.collect(wait=True), saver.collect(wait=True)]

    one, other = on_two_ranks(job, tmp_path)
    assert one == other
    assert one[:2] == [None, None]
    assert (one[2].step, one[2].path) == (3, tmp_path / "checkpoints/step-00000003")
    assert 0 < one[2].seconds < LONG_SECONDS
    assert one[3] is None
    assert steps(tmp_path) == [3]


@pytest.mark.parametrize("wait", [True, False])
def test_saving_that_fails_ends_all_ranks_with_the_path(
    wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(state: object, path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", fail)

    one, other = on_two_ranks(partial(save_third, wait=wait), tmp_path)
    assert one == other
    assert one.startswith(f"cannot write checkpoint {tmp_path}/checkpoints/step-00000003: No space left")
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize("wait", [True, False])
def test_saving_that_takes_too_long_ends_all_ranks_and_gets_no_name(
    wait: bool, tmp_path: Path, storage: Storage
) -> None:
    writers: list[Any] = []

    def job(saver: CheckpointSaver, rank: int) -> None:
        save_third(saver, rank, wait=wait, on_start=writers.append)

    one, other = on_two_ranks(job, tmp_path, limit=0.3)
    assert one == other
    for words in (f"{tmp_path}/checkpoints/step-00000003 is not on disk after 0.3 s", "checkpoint_timeout_seconds"):
        assert words in one
    storage.goes_on.set()
    assert next(filter(None, writers)).ends_within(LONG_SECONDS)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_saving_without_memory_for_the_copy_ends_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(state: object) -> object:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: can't allocate memory: 4 bytes")

    monkeypatch.setattr(saving, "copy_to_host", refuse)

    one, other = on_two_ranks(partial(save_third, wait=True), tmp_path)
    assert one == other
    assert one.startswith(f"cannot copy the state for checkpoint {tmp_path}/checkpoints/step-00000003: the host")


def test_saving_a_state_that_cannot_be_read_fails_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(state: object) -> object:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(saving, "copy_to_host", refuse)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        start(make_saver(tmp_path), done=3)


def test_saving_ends_what_is_under_way_where_the_run_fails(tmp_path: Path, storage: Storage) -> None:
    parts, told = make_parts(), []

    def tell_the_others(exit_code: int) -> None:
        told.append(steps(tmp_path))
        storage.goes_on.set()

    communicator: Any = SimpleNamespace(rank=0, world_size=1, connection=SimpleNamespace(abort=tell_the_others))
    parts = replace(parts, communicator=communicator)
    saver = make_saver(tmp_path, parts=parts)
    saver.close(errors.FAILED)
    assert not told, "nothing was under way"
    start(saver, done=3)
    saver.close(errors.FAILED)
    assert told == [[]], "the others are told before this one waits"
    assert steps(tmp_path) == [3]
    saver.close(errors.FAILED)
    assert len(told) == 1


def test_saving_leaves_the_connection_to_a_job_that_heals(tmp_path: Path, storage: Storage) -> None:
    """And keeps the others waiting for half of their limit at most."""
    control: Any = SimpleNamespace(timeout_seconds=0.1)
    connection = SimpleNamespace(endpoints=(), control=control)  # without an abort to call
    communicator: Any = SimpleNamespace(rank=0, world_size=1, connection=connection)
    saver = make_saver(tmp_path, parts=replace(make_parts(), communicator=communicator))
    start(saver, done=3)
    saver.close(errors.LOST)
    write = saver._write
    assert write is not None
    assert not write.is_awaited
    storage.goes_on.set()
    assert write.ends_within(LONG_SECONDS)
    assert steps(tmp_path) == []


def test_saving_that_does_not_end_is_left_without_a_name(
    tmp_path: Path, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "LEAVE_SECONDS", 0.05)
    connection = SimpleNamespace(abort=lambda exit_code: None)
    communicator: Any = SimpleNamespace(rank=0, world_size=1, connection=connection)
    saver = make_saver(tmp_path, parts=replace(make_parts(), communicator=communicator))
    start(saver, done=3)
    saver.close(errors.FAILED)
    storage.goes_on.set()
    write = saver._write
    assert write is not None
    assert write.ends_within(LONG_SECONDS)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_saving_into_a_folder_that_is_taken_over_meanwhile_gets_no_name(tmp_path: Path, storage: Storage) -> None:
    with owning(tmp_path) as held:
        saver = make_saver(tmp_path, held=held)
        start(saver, done=3)
        assert storage.begun.wait(LONG_SECONDS)
        (tmp_path / ".owner-2").write_text("")
        storage.goes_on.set()
        with pytest.raises(RunFolderError, match=naming(tmp_path, "now belongs to another job")):
            saver.collect(wait=True)
    assert list((tmp_path / "checkpoints").iterdir()) == []
