"""data.balance: two ranks draw and read the images of one rank, and learn its bits."""

from pathlib import Path

import numpy as np
import pytest

from bigbatch.tools.replay.replay import main as replay
from bigbatch.trainer.datasets.generated import CLASSES, write_dataset
from bigbatch.trainer.input.balanced import balanced_order
from tests.laws.jobs import alone, assert_identical, final_state, forked, records, run, train_command

COUNTS = [3] * 5 + [16] * 5
SETTINGS = {"data.balance": 1, "run.reproducible": True, "run.digest_every_steps": 1}
"""Two epochs of two steps."""


@pytest.mark.long
def test_balanced_training_on_two_ranks_is_that_of_one(tmp_path: Path) -> None:
    data, one, two = (tmp_path / name for name in ("data", "one", "two"))
    write_dataset(data, train_per_class=16, val_per_class=1, side_pixels=(32, 32))
    for name, count in zip(CLASSES, COUNTS, strict=True):
        for path in sorted((data / "train" / name).iterdir())[count:]:
            path.unlink()
    run(alone(train_command(data, one, SETTINGS)))
    run(forked(train_command(data, two, SETTINGS), ranks=2))
    labels_N = np.repeat(np.arange(10), COUNTS)
    order = balanced_order(labels_N, seed=0, balance=1.0)
    asked = [(order(epoch) % len(labels_N))[first : first + 32].tolist() for epoch in (0, 1) for first in (0, 32)]
    digests = [records(each, "digests") for each in (one, two)]
    for record, other, positions in zip(*digests, asked, strict=True):
        assert record["positions"] == other["positions"] == positions
        assert record["places"] == other["places"]
    assert any(len(set(positions)) < 32 for positions in asked), "no image is drawn twice"
    assert_identical(final_state(two), final_state(one))
    assert replay([str(two), "--step", "3"]) == 0
