"""Count each class's images, and those answered right, in a run's last evaluation: its summary names the worst."""

from typing import Any

import torch
from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.trainer.inference.accuracy import rank_classes
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.input.prepare_batch import on_device

NUM_NAMED = 3
"""Classes that the summary names."""


class ClassCounts:
    """Counts of one evaluation, on the device; class_names: in the order of the labels."""

    def __init__(self, class_names: tuple[str, ...], device: torch.device) -> None:
        self._names = class_names
        self._counts_2K = torch.zeros(2, len(class_names), dtype=torch.float64, device=device)

    def add(self, batch: Batch, logits_BK: Tensor) -> None:
        """Count a batch of this rank."""
        device = self._counts_2K.device
        labels_B, valid_B = (on_device(each, device) for each in (batch.labels_B, batch.valid_B))
        right_B = (rank_classes(logits_BK)[:, 0] == labels_B) & valid_B
        for counts_K, weights_B in zip(self._counts_2K, (valid_B, right_B), strict=True):
            counts_K.index_add_(0, labels_B, weights_B.double())

    def worst(self, communicator: Communicator) -> list[dict[str, Any]]:
        """Return the classes with the least share of right answers, of those that have a wrong one. Collective."""
        images_K, right_K = communicator.sum_(self._counts_2K.flatten(), label="classes").cpu().view(2, -1).tolist()
        found = [
            {"class": name, "images": int(images), "recall": right / images}
            for name, images, right in zip(self._names, images_K, right_K, strict=True)
            if right < images
        ]
        return sorted(found, key=lambda each: each["recall"])[:NUM_NAMED]
