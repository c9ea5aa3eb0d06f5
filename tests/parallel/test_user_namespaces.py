"""Ranks of one host, each in a user namespace of its own, as Apptainer without setuid starts them."""

import ctypes
import os
from pathlib import Path

import pytest
import torch
from forked_ranks import exit_codes, places, start_rank

from bigbatch.comm.connection import connect

RIGHT, WRONG, NOT_ALLOWED = 0, 3, 4
CLONE_NEWUSER = 0x10000000


def add() -> int:
    """What a rank does: leave the user namespace of the others, then add up numbers in memory of the job."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWUSER):
        return NOT_ALLOWED
    communicator = connect(timeout_seconds=60)
    numbers_N = communicator.allocate(3, torch.float32).fill_(2.0**communicator.rank)
    communicator.all_reduce_(numbers_N)
    sums = numbers_N.tolist()
    communicator.close()
    return RIGHT if sums == [3.0] * 3 else WRONG


@pytest.mark.skipif(not Path("/proc/self/ns/user").exists(), reason="no user namespaces")
def test_ranks_in_user_namespaces_of_their_own_add_up(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ranks = [start_rank("test_user_namespaces:add", [], environ=place, stdout=log, stderr=log) for place in places(2)]
    codes = exit_codes(ranks, timeout_seconds=100)
    if codes == [NOT_ALLOWED] * 2:
        pytest.skip(f"user {os.getuid()} may make no user namespace here")
    assert codes == [RIGHT] * 2, log.read_text()
