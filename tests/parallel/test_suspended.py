"""A job that is stopped as a whole, as `scontrol suspend` and Ctrl-Z stop it, and goes on later."""

import time
from pathlib import Path

import psutil
import pytest
from forked_ranks import exit_codes, places, start_rank

STOPPED_SECONDS = 16.0
"""Longer than the ranks' time limits of 12 s, and than the pause that a busy machine may make."""


@pytest.mark.long
@pytest.mark.parametrize("what", ["sum", "connect"])
def test_job_that_was_suspended_goes_on(what: str, tmp_path: Path) -> None:
    """The time that it was stopped counts towards no limit: no rank was late."""
    said = tmp_path / "said"
    ranks = [
        start_rank("ranks_suspended:main", [what, str(tmp_path)], environ=place, stdout=said, stderr=said)
        for place in places(2)
    ]
    deadline = time.monotonic() + 120
    while not (tmp_path / "waits").exists():
        assert time.monotonic() < deadline, [rank.exitcode for rank in ranks]
        time.sleep(0.01)
    time.sleep(1)  # rank 0 waits now, and rank 1 does not come before it is told to
    whole = [psutil.Process(rank.pid) for rank in ranks]
    whole += [child for rank in whole for child in rank.children(recursive=True)]
    assert len(whole) > 2, "the store's process is among them"
    for each in whole:
        each.suspend()
    time.sleep(STOPPED_SECONDS)
    for each in whole:
        each.resume()
    time.sleep(1)  # nor at once after the stop
    (tmp_path / "come").touch()
    assert exit_codes(ranks, timeout_seconds=120) == [0, 0], said.read_text()
    assert said.read_text() == "3.0\n3.0\n"
