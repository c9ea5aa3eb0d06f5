"""A loss of one's own that waits for a test: a training is still under way, however slow the test is."""

import time
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from bigbatch.trainer.folder.folder import RunDir, read_records


def loss(logits_BK: Tensor, targets: Tensor, *, run: str, reports: int, until: str) -> Tensor:
    """Cross entropy of each image; once a run has reported so often, when the file is there."""
    while not Path(until).exists() and num_reports(run) >= reports:
        time.sleep(0.02)
    return F.cross_entropy(logits_BK, targets, reduction="none")


def num_reports(run: str) -> int:
    """How often it has."""
    metrics = RunDir(Path(run)).metrics
    return sum(record["kind"] == "train" for record in read_records(metrics)) if metrics.exists() else 0
