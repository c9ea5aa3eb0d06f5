"""The last line of a run that failed: where the same command continues."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from tiny_training import TINY

from bigbatch import cli
from bigbatch.errors import OutOfMemory, UserError
from bigbatch.trainer import run
from bigbatch.trainer.in_python import train
from bigbatch.trainer.observe.hooks import TrainingHooks

KEYS: dict[str, Any] = {**TINY, "run.epochs": 6, "run.eval_every_epochs": 6, "run.checkpoint_every_steps": 2}
KEYS |= {"run.loggers": [], "schedule.warmup_epochs": 0, "schedule.base_lr": 0.1}


def notes_after(step: int, error: Exception, folder: Path, **keys: Any) -> tuple[BaseException, list[str]]:
    """Return what a run raises if a hook fails after so many steps, and the lines that are printed below it."""

    def fail(done: int) -> None:
        if done == step:
            raise error

    with pytest.raises(type(error)) as caught:
        train(
            "quickstart",
            {**KEYS, "run.directory": folder, **{f"run.{key}": value for key, value in keys.items()}},
            hooks=TrainingHooks(on_step=fail),
            quiet=True,
        )
    return caught.value, getattr(caught.value, "__notes__", [])


def test_failed_run_says_from_which_step_the_same_command_continues(tmp_path: Path) -> None:
    _, notes = notes_after(1, ValueError("of a hook"), tmp_path)
    assert notes == ["no checkpoint is saved yet: the same command starts from the beginning"]
    _, notes = notes_after(3, UserError("the input is gone"), tmp_path)
    assert notes == ["the same command continues from step 2"]
    _, notes = notes_after(
        5, ValueError("of a hook"), tmp_path / "other", resume=tmp_path / "checkpoints/step-00000002"
    )
    assert notes == ["with --run.resume auto the same command continues from step 4"]


def test_failed_run_reads_its_checkpoints_on_the_first_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "list_checkpoints", Mock(side_effect=AssertionError))
    failed = SimpleNamespace(communicator=SimpleNamespace(rank=1), config=Mock(), loop=Mock(), _rundir=Mock())
    assert run.TrainingRun._how_to_continue(failed) == []  # type: ignore[arg-type]


def test_failed_run_out_of_memory_says_so_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigbatch.trainer.memory.out_of_memory.explain", lambda *arguments, **options: "out of memory")
    with pytest.raises(OutOfMemory) as caught:
        notes_after(3, MemoryError(), tmp_path)
    assert caught.value.__notes__ == ["the same command continues from step 2"]


def test_failed_run_prints_its_last_line_below_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error, _ = notes_after(3, UserError("the input is gone"), tmp_path)

    def main(argv: list[str]) -> int:
        raise error

    monkeypatch.setattr("bigbatch.trainer.train.main", main)
    assert cli.main(["train"]) == 1
    assert capsys.readouterr().err == "bigbatch: the input is gone\nthe same command continues from step 2\n"
