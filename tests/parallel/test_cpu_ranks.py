"""Tests of the CPU, and the ranks that they start, see no GPU, whatever the machine has."""

import os
from pathlib import Path

import pytest
import torch
from forked_ranks import exit_codes, places, start_rank

from bigbatch.comm.connection import choose_device
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.errors import CommError

ON_CPU, REFUSED = 0, 3


def choose() -> int:
    """What a rank does first, on a machine that seems to have one GPU, which the driver's variable hides as ever."""
    count = len([name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",") if name])
    torch.cuda.is_available = lambda: count > 0
    torch.cuda.device_count = lambda: count
    try:
        return ON_CPU if choose_device(read_process_env()).type == "cpu" else -1
    except CommError as error:
        print(error)
        return REFUSED


@pytest.mark.parametrize(
    ("environ", "code"),
    [
        ({}, ON_CPU),
        ({"CUDA_VISIBLE_DEVICES": "0"}, REFUSED),
        ({"CUDA_VISIBLE_DEVICES": "0", "BIGBATCH_DEVICE": "cpu"}, ON_CPU),
    ],
)
def test_two_ranks_on_a_machine_with_one_gpu(environ: dict[str, str], code: int, tmp_path: Path) -> None:
    """As the tests start them, and, the refusal that they would meet otherwise, where the GPU is to be seen."""
    log = tmp_path / "log"
    target = "test_cpu_ranks:choose"
    ranks = [start_rank(target, [], environ={**place, **environ}, stdout=log, stderr=log) for place in places(2)]
    assert exit_codes(ranks, timeout_seconds=100) == [code, code]
    if code == REFUSED:
        for words in ("2 ranks", "1 GPUs", "--ranks 1", "bigbatch launch ... --device cpu", "--comm.backend gloo"):
            assert words in log.read_text()
