"""Ranks of one host, each in a user namespace of its own, as Apptainer without setuid starts them."""

import ctypes
import os
from pathlib import Path

import pytest
import torch
from forked_ranks import places
from test_parallel import fork_job

from bigbatch.comm.connect import connect

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
def test_ranks_in_user_namespaces_of_their_own_add_up() -> None:
    code, text = fork_job("test_user_namespaces:add", [], places(2), timeout_seconds=100)
    if code == NOT_ALLOWED:
        pytest.skip(f"user {os.getuid()} may make no user namespace here")
    assert code == RIGHT, text
