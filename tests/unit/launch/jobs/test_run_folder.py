"""What a launcher sees of the run that it has started."""

from pathlib import Path

import pytest

from bigbatch.launch.jobs import run_folder
from bigbatch.launch.jobs.run_folder import LEFT_SECONDS, RunLeft
from bigbatch.trainer.run.owner import owning


def test_run_is_left_some_time_after_its_owner_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks may take theirs; and what another start has left there before is not this one's."""
    now = 100.0
    monkeypatch.setattr(run_folder, "awake_seconds", lambda: now)
    with owning(tmp_path):
        pass
    has_left = RunLeft(str(tmp_path))
    assert not has_left()
    with owning(tmp_path):
        assert not has_left()
    assert not has_left()
    now += LEFT_SECONDS / 2
    assert not has_left()
    now += LEFT_SECONDS
    assert has_left()
