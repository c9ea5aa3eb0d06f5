"""Jobs that lose a rank and heal, as they really run here."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bigbatch.trainer.datasets.generated import write_dataset
from tests.laws.jobs import assert_identical, final_state, forked, run, train_command

LOSS = {
    "optimizer.loss": "tests.parallel.losing_loss.loss",
    "optimizer.label_smoothing": 0,
    "run.checkpoint_every_steps": 2,
}


@pytest.mark.long
def test_local_job_that_loses_ranks_ends_with_the_bits_of_one_that_does_not(tmp_path: Path) -> None:
    """Law 7, healed without a person: rank 1 dies in the middle of a step after each of two checkpoints."""
    write_dataset(tmp_path / "data", train_per_class=16, val_per_class=7, side_pixels=(36, 48))
    run(forked(train_command(tmp_path / "data", tmp_path / "undisturbed", LOSS), ranks=2))
    command = train_command(tmp_path / "data", tmp_path / "healed", LOSS)
    done = subprocess.run(
        [sys.executable, "-m", "bigbatch", "launch", "local", "--ranks", "2", "--restarts", "1", "--", *command],
        env={**os.environ, "LOSE_AFTER": "2 4", "LOSE_RUN": str(tmp_path / "healed")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("rank 1 was ended by SIGKILL") == 2
    assert done.stderr.count(f"starting again, from {tmp_path}/healed/checkpoints/step-") == 2
    assert_identical(final_state(tmp_path / "healed"), final_state(tmp_path / "undisturbed"))
