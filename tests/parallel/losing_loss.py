"""A loss of one's own in which rank 1 is lost by SIGKILL, once after each of LOSE_RUN's checkpoints in LOSE_AFTER.

With LOSE_WHOM=launcher, what started it is lost instead; LOSE_BY names another signal.
"""

import os
import signal
from glob import glob
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor


def loss(logits_BK: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy of each image, for the ranks that continue."""
    run = Path(os.environ.get("LOSE_RUN", ""))
    for step in os.environ.get("LOSE_AFTER", "").split():
        mark = run / f"lost-{step}"
        rank = os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
        kept = glob(f"{run / 'checkpoints'}/step-*")
        # that very one may have been gone between two looks, or never made
        seen = any(int(folder.rpartition("-")[2]) >= int(step) for folder in kept)
        if rank == "1" and seen and not mark.exists():
            mark.touch()
            victim = os.getppid() if os.environ.get("LOSE_WHOM") == "launcher" else os.getpid()
            os.kill(victim, signal.Signals[os.environ.get("LOSE_BY", "SIGKILL")])
    return F.cross_entropy(logits_BK, targets, reduction="none")
