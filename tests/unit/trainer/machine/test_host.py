"""What a rank's process takes of its host."""

import os
from types import SimpleNamespace

import pytest
import torch

from bigbatch.trainer.machine import host


@pytest.mark.parametrize(
    ("others", "threads"),
    [
        ([], 4),  # alone on four cores
        (["here [0, 1, 2, 3]"], 2),  # one more rank on the same cores
        (["here [0, 1, 2, 3]"] * 7, 1),  # more ranks than cores
        (["here [4, 5, 6, 7]"], 4),  # bound to other cores
        (["there [0, 1, 2, 3]"] * 3, 4),  # on other hosts
    ],
)
def test_ranks_share_the_cores_that_they_have_in_common(
    others: list[str], threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(host, "keep_freed_memory", lambda: None)
    env = SimpleNamespace(host="here")
    communicator = SimpleNamespace(device=torch.device("cpu"), gather_text=lambda text: [text, *others], env=env)
    host.set_up_process(communicator, cudnn_benchmark=True)
    assert chosen == [threads]
