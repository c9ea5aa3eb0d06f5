"""Whole runs, small: what ends them, what they record, and that a resumed one continues with the same bits."""

import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from error_texts import naming
from owned_folder import owning
from sample_images import encoded, smooth_image, write
from small_run import PLAN
from tiny_training import TINY

from bigbatch.errors import CheckpointError, RunFolderError, TrainingDiverged
from bigbatch.trainer import dry_run, train
from bigbatch.trainer import run as run_module
from bigbatch.trainer.build import job
from bigbatch.trainer.checkpoint import saving
from bigbatch.trainer.checkpoint.checkpoint import best_checkpoint, list_checkpoints, load_checkpoint, save_checkpoint
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder import owner
from bigbatch.trainer.folder.folder import RunDir, read_records
from bigbatch.trainer.step import stop_request
from bigbatch.trainer.step.window import Totals

STEPS_PER_EPOCH = 2
SMALL = {**TINY, "data.image_size": 8, "batch.global_batch_size": 32, "batch.microbatch_size": 16, "batch.bn_span": 16}
"""Labels that no image tells: nothing can be learned."""
SMALL |= {"run.epochs": 6, "run.log_every_steps": 1, "run.eval_every_epochs": 1, "run.keep_checkpoints": 100}
SMALL |= {"schedule.warmup_epochs": 1}
FP16 = {"optimizer.precision": "fp16", "optimizer.loss_scale": 256.0, "optimizer.loss_scale_growth_steps": 3}
HARDLY = {"schedule.base_lr": 1e-9, "schedule.end_lr": 0}


@pytest.fixture(autouse=True)
def _threads_of_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would take all cores of the machine, for the tests that follow, too."""
    monkeypatch.setattr(job, "set_up_process", lambda communicator, **_: None)


def start(run: Path, changes: Mapping[str, object] | None = None, *, flags: Sequence[str] = ()) -> int:
    settings = {**SMALL, "run.directory": run, **(changes or {})}
    return train.main(["--config", "quickstart", *(f"--{key}={value}" for key, value in settings.items()), *flags])


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(RunDir(run).metrics) if record["kind"] == kind]


def summary(run: Path) -> dict[str, Any]:
    return dict(json.loads(RunDir(run).summary.read_text()))


def drop_checkpoints_after(run: Path, *, step: int) -> None:
    RunDir(run).summary.unlink()
    for checkpoint in list_checkpoints(RunDir(run).checkpoints):
        if checkpoint.step > step:
            shutil.rmtree(checkpoint.path)


@pytest.mark.slow
def test_run_dry_says_what_it_would_be_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_staged(argv: Sequence[str], **how: bool) -> Config:  # a config refuses to stage what is synthetic
        config = load_config(argv, **how)
        object.__setattr__(config.data, "stage", str(tmp_path / "staged"))
        return config

    monkeypatch.setattr(train, "load_config", load_staged)
    run = tmp_path / "run"
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert start(run, {"run.eval_every_epochs": 3}, flags=["--dry-run"]) == 0
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, "the first Ctrl-C ends it"
    printed = capsys.readouterr().out
    assert "global batch 32 = 1 rank x 2 microbatches x 16" in printed
    assert "\nbuffer 0: " in printed
    # 64 images are 2 steps of 32, in each of 6 epochs, and each third is evaluated
    assert re.search(naming("dry run: 12 steps, 2 in an epoch, with 2 evaluations", run), printed)
    assert re.search(
        r"memory of a rank: .* MB .*; of a checkpoint: .* MB\ntime of an epoch's steps: not known yet", printed
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_run_whose_output_has_no_reader_saves_and_stops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_request, "LOOK_SECONDS", 0.01)
    monkeypatch.setenv("BIGBATCH_TERMINAL_COLUMNS", "80")
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert start(tmp_path, {"run.epochs": 2000, "run.eval_every_epochs": 2000}) == 130
    saved = list_checkpoints(RunDir(tmp_path).checkpoints)[-1].step
    assert saved == records(tmp_path, "train")[-1]["step"] < 4000
    assert "standard output" in capsys.readouterr().err


def test_run_that_is_finished_keeps_the_settings_of_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = {"run.epochs": 1, "schedule.warmup_epochs": 0, "schedule.base_lr": 0.25, "schedule.end_lr": 0}
    assert start(tmp_path, short) == 0
    files = {path: path.read_bytes() for path in (RunDir(tmp_path).config, RunDir(tmp_path).summary)}
    assert b"base_lr: 0.25\n" in files[RunDir(tmp_path).config]
    for rate, said in ((0.25, False), (0.5, True)):
        capsys.readouterr()
        assert start(tmp_path, {**short, "schedule.base_lr": rate}) == 0
        line = naming("this run is finished", "another run.directory", r"schedule.base_lr=0.5 (was 0.25)")
        assert bool(re.search(line, printed := capsys.readouterr().out)) is said
        assert "resuming with a changed config" not in printed
        assert {path: path.read_bytes() for path in files} == files
    assert start(tmp_path, {**short, "schedule.base_lr": 0.5, "run.epochs": 2}) == 0, "two steps left: it continues"
    assert "resuming with a changed config: run.epochs=2 (was 1), schedule.base_lr=0.5" in capsys.readouterr().out
    assert "base_lr: 0.5\n" in RunDir(tmp_path).config.read_text()


@pytest.mark.long
def test_run_ends_at_its_target_and_so_does_its_resume(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # the schedule stays that of all epochs, which have room for the warm-up
    found = {"run.target_top1": 0.001, "run.eval_every_epochs": 2, "schedule.warmup_epochs": 3}
    assert start(tmp_path, found) == 0
    first = summary(tmp_path)
    assert first["ended_by"].startswith("run.target_top1=0.001: top-1 was 0.")
    assert (first["steps"], first["epochs"]) == (2 * STEPS_PER_EPOCH, 2)
    assert list_checkpoints(RunDir(tmp_path).checkpoints)[-1].top1 == first["top1"]
    rates = [record["lr"] for record in records(tmp_path, "train")]
    metrics = RunDir(tmp_path).metrics.read_bytes()
    capsys.readouterr()

    assert start(tmp_path, found) == 0
    assert "this run was finished before" in capsys.readouterr().out
    assert summary(tmp_path) == first
    assert RunDir(tmp_path).metrics.read_bytes() == metrics, "a start would count as a resume, without reports"
    RunDir(tmp_path).summary.unlink()
    assert start(tmp_path, found) == 0
    assert {key: summary(tmp_path)[key] for key in ("ended_by", "steps", "epochs")} == {
        key: first[key] for key in ("ended_by", "steps", "epochs")
    }

    assert start(tmp_path, {**found, "run.target_top1": "null"}) == 0, "another target: it continues"
    assert summary(tmp_path)["ended_by"] == "run.epochs"
    assert summary(tmp_path)["steps"] == 6 * STEPS_PER_EPOCH
    assert [record["step"] for record in records(tmp_path, "train")] == list(range(1, 13))
    assert [record["lr"] for record in records(tmp_path, "train")][: len(rates)] == rates


@pytest.mark.slow
def test_run_refuses_a_checkpoint_of_other_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BIGBATCH_STOP_SECONDS", "0")
    assert start(tmp_path, {"run.epochs": 1}, flags=["--quiet"]) == 0
    assert capsys.readouterr().out == ""
    (hint,) = (record["hint"] for record in records(tmp_path, "hint") if "--stop-seconds" in record["hint"])
    assert "the job asks 0 s before" in hint
    named = naming("step-00000002: ", " 10 classes", "data.num_classes is 5", "data.num_classes to 10")
    with pytest.raises(CheckpointError, match=named):
        start(tmp_path, {"run.epochs": 2, "data.num_classes": 5})


@pytest.mark.long
def test_run_ends_at_the_loss_of_a_guess(tmp_path: Path) -> None:
    with pytest.raises(
        TrainingDiverged, match=naming("steps 3 to 7", " 2.303", "schedule.base_lr", "run.divergence_steps")
    ):
        start(tmp_path, {"run.divergence_steps": 5, **HARDLY})
    assert records(tmp_path, "train")[-1]["step"] == 7


@pytest.mark.long
def test_run_ends_where_the_scale_overflows_for_ever(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    static = {**FP16, "optimizer.loss_scale": 2.0**24, "optimizer.loss_scale_growth_steps": "null"}
    with pytest.raises(TrainingDiverged, match=naming("steps from 1 to 32 ", " 1.67772e+07", "optimizer.loss_scale")):
        start(tmp_path, {**static, "run.epochs": 40, "run.eval_every_epochs": 40, "run.log_every_steps": 4})
    assert [record["overflow_steps"] for record in records(tmp_path, "train")][-1] == 32
    lines = [line for line in capsys.readouterr().out.splitlines() if "  loss " in line]
    skipped = [line.rpartition("  updates skipped ")[2].split()[0] for line in lines]
    assert skipped == [str(step) for step in range(4, 33, 4)]


def test_run_in_the_folder_of_a_living_job_is_refused_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "PATIENCE_SECONDS", 0.0)
    with owning(tmp_path), pytest.raises(RunFolderError, match=naming(tmp_path, f"process {os.getpid()}")):
        start(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".owner-1"]


def test_run_whose_folder_was_taken_over_saves_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run was stopped, as by a debugger or hanging storage, for longer than other jobs wait."""

    def save_and_lose(*arguments: Any, **settings: Any) -> Path:
        path = save_checkpoint(*arguments, **settings)
        (tmp_path / ".owner-2").write_text("")
        return path

    monkeypatch.setattr(saving, "save_checkpoint", save_and_lose)
    with pytest.raises(RunFolderError, match=naming(tmp_path, "now belongs to another job")):
        start(tmp_path, {"run.checkpoint_every_steps": 1})
    assert [checkpoint.step for checkpoint in list_checkpoints(RunDir(tmp_path).checkpoints)] == [1]


@pytest.mark.long
def test_run_ends_after_evaluations_without_progress(tmp_path: Path) -> None:
    rule = {"run.stop_metric": "top1", "run.stop_after_evaluations": 2, "run.epochs": 20, **HARDLY}
    assert start(tmp_path, rule) == 0
    top1s = [record["top1"] for record in records(tmp_path, "eval")]
    best = top1s.index(max(top1s))
    assert len(top1s) - 1 - best == 2, "two after the best"
    assert summary(tmp_path)["ended_by"].startswith("run.stop_metric=top1: none of 2 evaluations")
    assert summary(tmp_path)["epochs"] == len(top1s) < 20

    drop_checkpoints_after(tmp_path, step=(len(top1s) - 1) * STEPS_PER_EPOCH)
    assert start(tmp_path, rule) == 0
    assert [record["top1"] for record in records(tmp_path, "eval")] == top1s, "a resumed run remembers the others"


@pytest.mark.slow
def test_resumed_run_counts_only_evaluations_on_its_validation_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The best top-1 of a run never compares two validation sets; an unchanged set counts as before."""
    names = {"train": 32, "val": 8}
    data, run = tmp_path / "data", tmp_path / "run"
    for split, number in names.items():
        write(data / split, {f"{'ab'[n % 2]}/{n}.jpg": encoded(smooth_image(n, 9, 9)) for n in range(number)})
    own = {"data.loader": "torchvision", "data.root": data, "data.num_classes": 2}
    own |= {"data.num_synthetic_samples": "null", "schedule.warmup_epochs": 0}
    for epochs, added in ((1, False), (2, False), (3, True)):
        if added:
            shutil.copy(data / "val/a/0.jpg", data / "val/a/copy.jpg")
        assert start(run, {**own, "run.epochs": epochs, **HARDLY}) == 0
        assert ("evaluated on other validation images" in capsys.readouterr().out) is added
        *_, newest = list_checkpoints(RunDir(run).checkpoints)
        steps = [each["step"] for each in load_checkpoint(newest.path)["evaluations"]]
        assert steps == ([2, 3] if added else [*range(1, epochs + 1)])
    evaluated = records(run, "eval")
    assert [(each["step"], each["count"]) for each in evaluated] == [(1, 8), (2, 9), (3, 9)]
    before = summary(run)
    (data / "val/a/copy.jpg").unlink()
    assert start(run, {**own, "run.epochs": 3, **HARDLY}) == 0, "a finished run stays as it is"
    assert (summary(run), records(run, "eval")) == (before, evaluated)
    found = list_checkpoints(RunDir(run).checkpoints)
    assert [each.val_samples == newest.val_samples for each in found] == [False, True, True]
    manifest = found[0].path / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"top1": {found[0].top1}', '"top1": 1.0'))
    best = best_checkpoint(list_checkpoints(RunDir(run).checkpoints))
    assert best is not None
    assert best.step > 1


def test_run_closes_its_loggers_while_the_other_ranks_wait_for_rank_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may send for a minute, longer than other ranks wait in the last barrier."""
    events: list[str] = []

    def write_on_first(write: Callable[[], str], *_: object, **__: object) -> str:
        text = write()
        events.append("told")
        return text

    def output_of_run(event: str) -> Callable[..., None]:
        return lambda *_, **__: events.append(event)

    monkeypatch.setattr(run_module, "write_on_first", write_on_first)
    run: Any = MagicMock()
    run.output = SimpleNamespace(**{name: output_of_run(name) for name in ("finish", "leave_terminal", "close")})
    assert run_module.TrainingRun._finish(run, Totals()) is None
    assert events == ["finish", "leave_terminal", "close", "told"]


@pytest.mark.parametrize(("record", "said"), [({}, "not known yet"), ({"images_per_second": 16.0}, "1 s, by its")])
def test_run_dry_reads_reports_that_lack_a_rate(
    record: dict[str, float], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "train", "step": 1, **record}) + "\n")
    monkeypatch.setattr(dry_run, "rank_bytes", lambda *_: 1)
    monkeypatch.setattr(dry_run, "checkpoint_bytes", lambda *_: 1)
    config: Any = SimpleNamespace(run=SimpleNamespace(directory=str(tmp_path)))
    plan = replace(PLAN, steps_per_epoch=2, global_batch_size=8)
    *_, last = dry_run.lines(config, MagicMock(), plan=plan)
    assert last.startswith(f"time of an epoch's steps: {said}")
