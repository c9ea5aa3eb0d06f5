"""`bigbatch` on ranks that are told to capture their steps, of which the last rank cannot: the target of a job."""

import os
from collections.abc import Callable
from typing import Any

import forked_ranks
import pytest
import torch
from torch import Tensor

from bigbatch.trainer.build import parts
from bigbatch.trainer.step import cuda_graph


class Capture:
    """Captures nothing, or fails."""

    def __init__(self, device: torch.device) -> None:
        self._fails = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)

    def warm_up(self, work: Callable[[], Tensor]) -> Tensor:
        return work()

    def __call__(self, work: Callable[[Any], Tensor]) -> tuple[list[Callable[[], None]], Tensor]:
        if self._fails:
            raise RuntimeError("operation not permitted when stream is capturing")
        return [lambda: None], torch.zeros(1)


def bigbatch(*command: str) -> int:
    """Run the command; capturing is played, and the rest happens."""
    patch = pytest.MonkeyPatch()  # until this process ends
    patch.setattr(parts, "require_capturable", lambda transport: None)
    patch.setattr(cuda_graph, "CudaCapture", Capture)
    return forked_ranks.bigbatch(*command)
