"""One rank of a job in which rank 1 computes nonsense from its third step on, as a broken GPU does: `COMMAND ...`."""

import torch
import torch.nn.functional as F
from forked_ranks import bigbatch
from torch import Tensor

from bigbatch.comm.rendezvous.environ import read_process_env

MICROBATCHES = 2
"""Of a rank in a step: two ranks share four."""

calls = 0
healthy = F.cross_entropy


def broken(logits_BK: Tensor, targets: Tensor, **options: object) -> Tensor:
    """The loss of two steps, then one that is not finite."""
    global calls
    calls += 1
    loss = healthy(logits_BK, targets, **options)  # type: ignore[arg-type]
    return loss if calls <= 2 * MICROBATCHES else loss * torch.nan


def main(*command: str) -> int:
    """bigbatch, where rank 1 is broken."""
    if read_process_env().rank == 1:
        F.cross_entropy = broken
    return bigbatch(*command)
