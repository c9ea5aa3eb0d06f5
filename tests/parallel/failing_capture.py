"""`bigbatch` on ranks that are told to capture their steps, of which the last rank cannot: the target of a job."""

import os
from collections.abc import Callable
from typing import Any

import forked_ranks
import pytest
import torch
from torch import Tensor

from bigbatch.comm.gradients.readiness import Readiness
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.trainer.build import parts
from bigbatch.trainer.step import cuda_graph

_add = Readiness.add


class Capture:
    """Captures nothing, or fails: in backward, after some gradients, before any sum."""

    def __init__(self, device: torch.device) -> None:
        self._fails = os.environ.get("RANK", "0") == str(int(os.environ.get("WORLD_SIZE", "1")) - 1)

    def warm_up(self, work: Callable[[], Tensor]) -> Tensor:
        return work()

    def __call__(self, work: Callable[[Any], Tensor]) -> tuple[list[Callable[[], None]], Tensor]:
        if self._fails:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(GradientReducer, "start_extra", lambda *arguments, **options: None)
                patch.setattr(Readiness, "add", _fail)
                work(lambda: None)
        return [lambda: None], torch.zeros(1)


def _fail(readiness: Readiness, name: str, *, index: int) -> None:
    if len(readiness.reached) > 2:
        raise RuntimeError("operation not permitted when stream is capturing")
    _add(readiness, name, index=index)


def bigbatch(*command: str) -> int:
    """Run the command; capturing is played, and the rest happens."""
    patch = pytest.MonkeyPatch()  # until this process ends
    patch.setattr(parts, "require_capturable", lambda transport: None)
    patch.setattr(cuda_graph, "CudaCapture", Capture)
    return forked_ranks.bigbatch(*command)
