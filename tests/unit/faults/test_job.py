"""What a campaign keeps of a job that is over."""

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from faults import rank as rank_side
from faults.experiment import Laboratory
from faults.job import ask
from faults.rank import Place
from faults.trial import Trial

SHAPE = Trial("kill", "sum", 3, 1, 1, 2, "gloo")


def live(place: Place, command: tuple[str, ...], trial: Trial | None, born: Connection) -> None:
    """A rank that has nothing to do."""
    born.send(os.getpid())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.weekly
@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts descriptors in /proc")
def test_campaign_keeps_no_descriptor_of_what_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After 54 trials it had none left below 1024."""
    context = multiprocessing.get_context("forkserver")
    monkeypatch.setattr(rank_side, "live", live)
    laboratory = Laboratory.__new__(Laboratory)  # whose images take torch
    laboratory._context, laboratory._folder, laboratory._timeout_seconds = context, tmp_path, 15
    laboratory._lock, laboratory._jobs, laboratory._is_over = threading.Lock(), [], False
    counted = []
    for number in range(4):
        assert ask(context, signal.Signals.__str__, signal.SIGTERM)
        laboratory._start(SHAPE, tmp_path / str(number), fault=None, cluster=None).follow()
        counted.append(descriptors())
    assert len(laboratory._jobs) == 1
    assert counted[-1] == counted[1], counted
