"""Tests of the CPU, and the ranks that they start, see no GPU, whatever the machine has."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
from forked_ranks import exit_codes, places, start_rank

from bigbatch.comm import connect, several_ranks
from bigbatch.comm.rendezvous.environ import read_process_env
from bigbatch.errors import CommError

ON_CPU, REFUSED, ON_OWN_GPU = 0, 3, 4


class MetError(Exception):
    """The ranks have met; NCCL would be next."""


def choose(chooser: str) -> int:
    """What a rank does first, on a machine that seems to have GPUs, which the driver's variable hides as ever."""
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",") if name]
    torch.cuda.is_available = lambda: len(names) > 0
    torch.cuda.device_count = lambda: len(names)
    torch.cuda.set_device = lambda device: None
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=names[device.index])

    def stop(*arguments: object, device: torch.device, **options: object) -> NoReturn:
        raise MetError(str(device))

    several_ranks.load_named = lambda table, name, key: stop
    try:  # bigbatch train chooses before it connects; a script may leave it to connect()
        device = connect.choose_device(read_process_env()) if chooser == "train" else None
        connect.connect(timeout_seconds=60, device=device)
    except MetError as error:
        return {"cpu": ON_CPU, "cuda:0": ON_OWN_GPU}[str(error)]
    except CommError as error:
        print(error)
        return REFUSED
    return -1


@pytest.mark.parametrize(
    ("environ", "code"),
    [
        ({}, ON_CPU),
        ({"CUDA_VISIBLE_DEVICES": "0"}, REFUSED),
        ({"CUDA_VISIBLE_DEVICES": "{rank}"}, ON_OWN_GPU),
        ({"CUDA_VISIBLE_DEVICES": "0", "BIGBATCH_DEVICE": "cpu"}, ON_CPU),
    ],
)
@pytest.mark.parametrize("chooser", ["train", "script"])
def test_two_ranks_that_see_one_gpu_each(environ: dict[str, str], code: int, chooser: str, tmp_path: Path) -> None:
    """Ranks as these tests start them; a refusal if both see the same GPU, and none if they do not."""
    log = tmp_path / "log"
    target = "test_cpu_ranks:choose"
    ranks = [
        start_rank(target, [chooser], environ={**place, **each}, stdout=log, stderr=log)
        for rank, place in enumerate(places(2))
        for each in [{name: value.format(rank=rank) for name, value in environ.items()}]
    ]
    assert exit_codes(ranks, timeout_seconds=100) == [code, code]
    if code == REFUSED:
        for words in ("2 ranks", "1 GPU ", "--ranks 1", "bigbatch launch ... --device cpu", "--comm.backend gloo"):
            assert words in log.read_text()
