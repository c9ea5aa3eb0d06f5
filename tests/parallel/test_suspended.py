"""A job that is stopped as a whole, as `scontrol suspend` and Ctrl-Z stop it, and goes on later."""

import time
from pathlib import Path

import psutil
import pytest
from forked_ranks import start_scripts

SCRIPT = Path(__file__).with_name("script_suspended.py")
STOPPED_SECONDS = 16.0
"""Longer than the script's time limits of 12 s, and than the pause that a busy machine may make."""


@pytest.mark.long
@pytest.mark.parametrize("what", ["sum", "connect"])
def test_job_that_was_suspended_goes_on(what: str, tmp_path: Path) -> None:
    """The time that it was stopped counts towards no limit: nobody was late."""
    ranks = start_scripts([str(SCRIPT), what], num_ranks=2, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "waits").exists():
            assert time.monotonic() < deadline, [rank.poll() for rank in ranks]
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
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [(rank.returncode, said) for rank, said in zip(ranks, outputs, strict=True)] == 2 * [(0, "3.0\n")]
