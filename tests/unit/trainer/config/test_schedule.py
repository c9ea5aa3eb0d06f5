"""The log lines about a schedule."""

import pytest

from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schedule import schedule_notes


@pytest.mark.parametrize(("epochs", "is_told"), [(12, False), (3, False), (2, True)])
def test_schedule_of_a_run_that_ends_with_its_warm_up_is_told(epochs: int, is_told: bool) -> None:
    """quickstart's warm-up is 2 epochs: a run of 1 epoch is refused, and one of 2 was accepted silently."""
    config = load_config(["--config", "quickstart", f"--run.epochs={epochs}"])
    notes = schedule_notes(config.schedule, epochs=config.run.epochs)
    assert bool(notes) == is_told
    if is_told:
        assert "schedule.warmup_epochs=2 of run.epochs=2" in notes[0]
        assert notes[0].endswith("--schedule.warmup_epochs 0.4")
