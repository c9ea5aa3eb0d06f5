"""Checkpoints that are written beside training hold the bits that they would hold if all ranks waited for them."""

from pathlib import Path
from typing import Any

import pytest
import torch

from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.run.checkpoint import list_checkpoints, load_checkpoint
from tests.laws.jobs import Forked, run

HERE = "tests.parallel.training_while_saving"
SAVED = (2, 3, 4, 6)
"""Every second step, and after the evaluation of each third."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "shapes"
    write_dataset(root, train_per_class=5, val_per_class=2, side_pixels=(36, 48))
    return root


def train(function: str, data: Path, folder: Path, *, ranks: int, update: str) -> list[str]:
    """Run on so many ranks; what each prints, the same: checkpoints as they were told to be on disk, and more."""
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
        pytest.param(1, "whole", marks=pytest.mark.long),
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
