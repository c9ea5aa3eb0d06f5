"""Runs whose storage is slow: training goes on while a checkpoint is written, or waits for each as it once did."""

import signal
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest

import bigbatch
from bigbatch.trainer.run import saving
from bigbatch.trainer.run.checkpoint import save_checkpoint
from bigbatch.trainer.run.saving import BackgroundWrite
from tests.parallel.training_in_python import STEPS, settings

LONG_SECONDS = 60.0
"""Longer than any step of a slow machine."""


def beside(root: str, out: str, sharded: str) -> int:
    """Train with storage that takes every checkpoint only when the step after it is done; the last, at the end."""
    stepped = [Event() for _ in range(STEPS + 1)]

    def save_late(*arguments: Any, step: int, **options: Any) -> Path:
        assert step == STEPS or stepped[step + 1].wait(LONG_SECONDS), f"step {step + 1} waited for the checkpoint"
        return save_checkpoint(*arguments, step=step, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "save_checkpoint", save_late)
        _train(root, out, sharded, on_step=lambda done: stepped[done].set())
    return 0


def in_turn(root: str, out: str, sharded: str) -> int:
    """Train as when all ranks waited for each checkpoint: of the state itself, without a copy."""

    class Waiting(BackgroundWrite):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            assert self.ends_within(LONG_SECONDS)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "copy_to_host", lambda state: state)
        patch.setattr(saving, "BackgroundWrite", Waiting)
        _train(root, out, sharded)
    return 0


def stopped(root: str, out: str, sharded: str) -> int:
    """Ask for a stop after step 3, while the checkpoint of step 2 is being written; it ends as the job leaves."""
    asked = Event()

    def save_late(*arguments: Any, step: int, **options: Any) -> Path:
        assert asked.wait(LONG_SECONDS)
        return save_checkpoint(*arguments, step=step, **options)

    def stop(done: int) -> None:
        if done == 3:
            asked.set()
            signal.raise_signal(signal.SIGUSR1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saving, "save_checkpoint", save_late)
        with pytest.raises(SystemExit, match=r"^130$"):
            _train(root, out, sharded, on_step=stop)
    return 0


def _train(root: str, out: str, sharded: str, **hooks: Any) -> None:
    changes = {"optimizer__sharded": sharded == "sharded"}
    told: list[str] = []
    watchers = bigbatch.TrainingHooks(on_checkpoint=lambda path: told.append(path.name), **hooks)
    try:
        bigbatch.train("quickstart", settings(root, Path(out), **changes), hooks=watchers, quiet=True)
    finally:
        sys.stdout.write(" ".join(told) + "\n")  # in one write, as the ranks share a pipe
