"""The answer of a model to each image of a split, and what the answers say of each class and of their certainty.

`bigbatch evaluate` loads it; the evaluations of a training do not.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bigbatch.comm.communicator import Communicator
from bigbatch.trainer.inference.accuracy import rank_classes
from bigbatch.trainer.input.base import Batch
from bigbatch.trainer.input.prepare_batch import on_device

NO_ANSWER = "no finite output"
"""Instead of a predicted class, whose number is then num_classes."""
NUM_BINS = 15
"""Bins of the calibration error, as of Guo et al. 2017."""
DEFINITION = (
    "expected calibration error: the mean over images of |accuracy - mean confidence| of an image's bin; confidence is "
    f"the softmax probability of the predicted class, in {NUM_BINS} bins ((m-1)/{NUM_BINS}, m/{NUM_BINS}] (Guo et al. "
    "2017, arXiv 1706.04599)"
)


class Answers:
    """Collects the answers to the images of a split, on the device, without a host sync."""

    def __init__(self, num_samples: int, *, device: torch.device) -> None:
        # per image: 1 if it is counted, label, predicted class, confidence
        self._answers_N4 = torch.zeros(num_samples, 4, dtype=torch.float64, device=device)

    def add(self, batch: Batch, logits_BK: Tensor) -> None:
        """Take the answers to one batch of this rank."""
        device = self._answers_N4.device
        labels_B, valid_B = on_device(batch.labels_B, device), on_device(batch.valid_B, device)
        positions_B = on_device(batch.request.indices_B, device)
        predicted_B, confidences_B = rank_classes(logits_BK)[:, 0], logits_BK.softmax(1).nan_to_num().amax(1)
        rows = (torch.ones_like(labels_B), labels_B, predicted_B, confidences_B)
        rows_B4 = torch.stack([row.double() for row in rows], dim=1)
        # padding repeats the position of a valid image, and adds 0
        self._answers_N4.index_add_(0, positions_B, torch.where(valid_B[:, None], rows_B4, 0.0))

    def gather(self, communicator: Communicator, *, num_classes: int) -> "Answered":
        """Return the answers of all ranks: each image is counted by one rank, so a sum is exact. Collective."""
        communicator.sum_(self._answers_N4.view(-1), label="answers of the evaluation")
        answers_N4 = self._answers_N4.cpu().numpy()
        positions_N = answers_N4[:, 0].nonzero()[0]
        labels_N, predicted_N = answers_N4[positions_N, 1:3].astype(np.int64).T
        return Answered(positions_N, labels_N, predicted_N, answers_N4[positions_N, 3], num_classes)


@dataclass(frozen=True)
class Answered:
    """The answers to the counted images of a split (N), in its order."""

    positions_N: np.ndarray
    labels_N: np.ndarray
    predicted_N: np.ndarray
    confidences_N: np.ndarray
    num_classes: int

    @property
    def is_right_N(self) -> np.ndarray:
        return self.labels_N == self.predicted_N

    def pairs(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return label, predicted class and number of images of each entry of the confusion matrix that is not 0.

        The largest is first; of equal ones the one with the lower label, then with the lower predicted class.
        """
        codes_P, counts_P = np.unique(self.labels_N * (self.num_classes + 1) + self.predicted_N, return_counts=True)
        order_P = np.argsort(-counts_P, kind="stable")
        labels_P, predicted_P = np.divmod(codes_P[order_P], self.num_classes + 1)
        return labels_P, predicted_P, counts_P[order_P]

    def by_class(self) -> list[dict[str, Any]]:
        """Return images, precision, recall, F1 of each class, and the class that its wrong images are most often.

        Precision is right / predicted, recall right / images, F1 2 right / (predicted + images), as in scikit-learn;
        None for 0 / 0. taken_for is (class, images), or None if no image of the class is wrong.
        """
        right_K, images_K, predicted_K = (
            np.bincount(classes_N, minlength=self.num_classes)[: self.num_classes].tolist()
            for classes_N in (self.labels_N[self.is_right_N], self.labels_N, self.predicted_N)
        )
        taken_for: dict[int, tuple[int, int]] = {}
        for label, predicted, number in zip(*(column.tolist() for column in self.pairs()), strict=True):
            if label != predicted:
                taken_for.setdefault(label, (predicted, number))
        return [
            {
                "images": images,
                "precision": right / predicted if predicted else None,
                "recall": right / images if images else None,
                "f1": 2 * right / (predicted + images) if predicted + images else None,
                "taken_for": taken_for.get(label),
            }
            for label, (right, images, predicted) in enumerate(zip(right_K, images_K, predicted_K, strict=True))
        ]

    def calibration(self) -> dict[str, Any]:
        """Return the calibration error as DEFINITION defines it, and images, accuracy and mean confidence by bin."""
        bins_N = np.clip(np.ceil(self.confidences_N * NUM_BINS).astype(np.int64) - 1, 0, NUM_BINS - 1)
        images_M, right_M, confidences_M = (
            np.bincount(bins_N, weights=weights_N, minlength=NUM_BINS)
            for weights_N in (None, self.is_right_N, self.confidences_N)
        )
        with np.errstate(invalid="ignore"):  # an empty bin has no mean
            accuracy_M, confidence_M = right_M / images_M, confidences_M / images_M
        return {
            "ece": float(np.abs(right_M - confidences_M).sum() / len(bins_N)),
            "bins": NUM_BINS,
            "definition": DEFINITION,
            "images": images_M.tolist(),
            "accuracy": [None if np.isnan(value) else value for value in accuracy_M.tolist()],
            "confidence": [None if np.isnan(value) else value for value in confidence_M.tolist()],
        }

    def most_certain_wrong(self, number: int) -> list[int]:
        """Return rows of the wrong images with the highest confidence, the most certain first."""
        return self._first(~self.is_right_N, -self.confidences_N, number)

    def least_certain_right(self, number: int) -> list[int]:
        """Return rows of the right images with the lowest confidence, the least certain first."""
        return self._first(self.is_right_N, self.confidences_N, number)

    def _first(self, is_meant_N: np.ndarray, keys_N: np.ndarray, number: int) -> list[int]:
        rows = is_meant_N.nonzero()[0]
        return [int(row) for row in rows[np.argsort(keys_N[rows], kind="stable")][:number]]
