"""Checkpoints that are written beside training hold the bits that they would hold if all ranks waited for them."""

import signal
import sys
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

import bigbatch
from bigbatch.trainer.checkpoint import saving
from bigbatch.trainer.checkpoint.checkpoint import list_checkpoints, load_checkpoint, save_checkpoint
from bigbatch.trainer.checkpoint.saving import BackgroundWrite
from bigbatch.trainer.datasets.generated import write_dataset
from tests.laws.jobs import Forked, run
from tests.parallel.training_in_python import STEPS, settings

HERE = "tests.parallel.test_training_while_saving"
LONG_SECONDS = 60.0
"""Longer than any step of a slow machine."""
SAVED = (2, 3, 4, 6)
"""Every second step, and after the evaluation of each third."""


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


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "shapes"
    write_dataset(root, train_per_class=5, val_per_class=2, side_pixels=(36, 48))
    return root


def train(function: str, data: Path, folder: Path, *, ranks: int, update: str) -> list[str]:
    """Run on so many ranks; return their output, equal on all: checkpoints as reported on disk, and more."""
    shown = run(Forked((str(data), str(folder), update), ranks=ranks, target=f"{HERE}:{function}")).stdout.splitlines()
    each = len(shown) // ranks
    assert sorted(shown) == sorted(shown[:each] * ranks), "all ranks are told the same"
    return shown


def states(folder: Path) -> dict[int, dict[str, Any]]:
    found = list_checkpoints(folder / "checkpoints")
    return {checkpoint.step: load_checkpoint(checkpoint.path) for checkpoint in found}


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """All that a state holds, by its place."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {place: each for key, inner in pairs for place, each in flat(inner, f"{name}/{key}").items()}
    return {name: value}


@pytest.mark.parametrize(
    ("ranks", "update"),
    [
        pytest.param(2, "sharded", marks=pytest.mark.slow),
        pytest.param(2, "whole", marks=pytest.mark.long),
    ],
)
def test_training_goes_on_while_a_checkpoint_is_written_which_has_the_same_bits(
    ranks: int, update: str, data: Path, tmp_path: Path
) -> None:
    shown = train("beside", data, tmp_path / "beside", ranks=ranks, update=update)
    assert shown[-1] == " ".join(f"step-{step:08d}" for step in SAVED)
    train("in_turn", data, tmp_path / "in turn", ranks=ranks, update=update)
    ours, theirs = states(tmp_path / "beside"), states(tmp_path / "in turn")
    assert tuple(ours) == tuple(theirs) == SAVED
    for step, state in ours.items():
        one, other = flat(state), flat(theirs[step])
        assert one.keys() == other.keys()
        # both name their folder; evaluations hold no seconds
        differing = [
            name
            for name, value in one.items()
            if not (torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name])
        ]
        assert differing == ["/config"], step


@pytest.mark.slow
def test_training_that_is_stopped_waits_for_what_is_written_and_for_its_own(data: Path, tmp_path: Path) -> None:
    shown = train("stopped", data, tmp_path / "run", ranks=2, update="whole")
    told = shown[0].split()
    assert told == [path.name for path in sorted((tmp_path / "run" / "checkpoints").iterdir())]
    assert told[0] == "step-00000002"
    assert len(told) >= 2
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
