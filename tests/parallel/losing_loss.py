"""A loss of one's own in which rank 1 is lost by SIGKILL, once after each of LOSE_RUN's checkpoints in LOSE_AFTER."""

import os
import signal
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor


def loss(logits_BK: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each picture, for the ranks that go on."""
    run = Path(os.environ.get("LOSE_RUN", ""))
    for step in os.environ.get("LOSE_AFTER", "").split():
        mark = run / f"lost-{step}"
        if os.environ["RANK"] == "1" and (run / f"checkpoints/step-{step:>08}").exists() and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    return F.cross_entropy(logits_BK, targets, reduction="none")
