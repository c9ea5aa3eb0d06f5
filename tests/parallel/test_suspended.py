"""A job that is stopped as a whole, as `scontrol suspend` and Ctrl-Z stop it, and continues later."""

import time
from pathlib import Path

import psutil
import pytest
import torch
from forked_ranks import exit_codes, places, start_rank

import bigbatch
from bigbatch.comm.rendezvous.environ import read_process_env

STOPPED_SECONDS = 16.0
"""Longer than the ranks' time limits of 12 s, and than the pause that a busy machine may make."""


def live(what: str, folder: str) -> int:
    """What one of two ranks does, the second of which comes late to a "sum" or to "connect", when a file is there."""
    rank = read_process_env().rank

    def come_late() -> None:
        if rank == 0:
            Path(folder, "waits").touch()
        else:
            while not Path(folder, "come").exists():
                time.sleep(0.01)

    if what == "connect":
        come_late()
    with bigbatch.connect(backend="tcp", timeout_seconds=12, warn_seconds=12) as communicator:
        if what == "sum":
            come_late()
        print(communicator.sum_(torch.full((1,), rank + 1.0), label="ones").item())
    return 0


@pytest.mark.long
def test_jobs_that_were_suspended_go_on(tmp_path: Path) -> None:
    """In a sum, and while they connect. The time that they were stopped counts towards no limit: no rank was late."""
    folders = {what: tmp_path / what for what in ("sum", "connect")}
    ranks = []
    for what, folder in folders.items():
        folder.mkdir()
        options = {"stdout": folder / "said", "stderr": folder / "said"}
        ranks += [start_rank("test_suspended:live", [what, str(folder)], environ=p, **options) for p in places(2)]
    deadline = time.monotonic() + 120
    while not all((folder / "waits").exists() for folder in folders.values()):
        assert time.monotonic() < deadline, [rank.exitcode for rank in ranks]
        time.sleep(0.01)
    whole: list[psutil.Process] = []
    while len(whole) < 6 and time.monotonic() < deadline:  # the stores' processes are among them
        whole = [psutil.Process(rank.pid) for rank in ranks]
        whole += [child for rank in whole for child in rank.children(recursive=True)]
    assert len(whole) == 6
    time.sleep(1)  # rank 0 of each waits now, and rank 1 does not come before it is told to
    for each in whole:
        each.suspend()
    time.sleep(STOPPED_SECONDS)
    for each in whole:
        each.resume()
    time.sleep(1)  # nor at once after the stop
    for folder in folders.values():
        (folder / "come").touch()
    codes = exit_codes(ranks, timeout_seconds=120)
    said = [(folder / "said").read_text() for folder in folders.values()]
    assert (codes, said) == ([0] * 4, ["3.0\n3.0\n"] * 2)
