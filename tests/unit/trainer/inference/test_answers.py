"""What the answers to all images say of classes, confusions and calibration, against closed forms."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from one_rank import alone

from bigbatch.tools.evaluation import EvaluationReport
from bigbatch.tools.evaluation_plots import draw_confusion
from bigbatch.trainer.inference.accuracy import count_batch
from bigbatch.trainer.inference.answers import NO_ANSWER, NUM_BINS, Answered, Answers
from bigbatch.trainer.inference.class_counts import ClassCounts
from bigbatch.trainer.input.base import Batch, Request


def answered(pairs: list[tuple[int, int]], confidences: list[float] | None = None, *, classes: int) -> Answered:
    labels_N, predicted_N = np.array(pairs, np.int64).T
    confidences_N = np.array(confidences or [1.0] * len(pairs))
    return Answered(np.arange(len(pairs)), labels_N, predicted_N, confidences_N, classes)


def test_figures_of_classes_are_those_of_the_definitions() -> None:
    """By counting one image at a time, as scikit-learn's definitions state; class 4 has no image, and is predicted."""
    generator = np.random.default_rng(0)
    pairs = [
        (int(a), int(b)) for a, b in zip(generator.integers(0, 4, 200), generator.integers(0, 5, 200), strict=True)
    ]
    found = answered(pairs, classes=6)
    for label, each in enumerate(found.by_class()):
        true_positives = sum(a == b == label for a, b in pairs)
        false_positives = sum(a != label and b == label for a, b in pairs)
        false_negatives = sum(a == label and b != label for a, b in pairs)
        assert each["images"] == true_positives + false_negatives
        if label == 5:
            assert (each["precision"], each["recall"], each["f1"]) == (None, None, None), "0 / 0"
            continue
        assert each["precision"] == true_positives / (true_positives + false_positives)
        if label == 4:
            assert (each["recall"], each["f1"], each["taken_for"]) == (None, 0, None)
            continue
        recall = true_positives / (true_positives + false_negatives)
        assert each["recall"] == recall
        assert each["f1"] == pytest.approx(2 * each["precision"] * recall / (each["precision"] + recall))
        wrong = [b for a, b in pairs if a == label != b]
        most = max(sorted(set(wrong)), key=wrong.count)
        assert each["taken_for"] == (most, wrong.count(most))
    counted = {(a, b): n for a, b, n in zip(*found.pairs(), strict=True)}
    assert counted == {pair: pairs.count(pair) for pair in product(range(6), range(6)) if pair in pairs}
    assert list(counted.values()) == sorted(counted.values(), reverse=True)


def test_calibration_error_of_two_bins() -> None:
    """2 of 4 right at 0.9, 1 of 1 at 0.61: (4 |0.5 - 0.9| + 1 |1 - 0.61|) / 5. Of an image at a bound the lower bin."""
    pairs = [(0, 0), (0, 0), (0, 1), (0, 1), (1, 1)]
    found = answered(pairs, [0.9, 0.9, 0.9, 0.9, 0.61], classes=2).calibration()
    assert found["ece"] == pytest.approx((4 * 0.4 + 0.39) / 5)
    assert found["bins"] == len(found["images"]) == NUM_BINS == 15
    filled = {bin: number for bin, number in enumerate(found["images"]) if number}
    assert filled == {9: 1, 13: 4}, "0.61 is in (9/15, 10/15], 0.9 in (13/15, 14/15]"
    assert (found["accuracy"][13], found["confidence"][13]) == (0.5, pytest.approx(0.9))
    assert found["accuracy"][0] is None
    assert answered([(0, 0)], [0.2], classes=2).calibration()["images"][2] == 1, "0.2 = 3/15 is in (2/15, 3/15]"
    assert answered([(0, 0)] * 3, [1.0] * 3, classes=2).calibration()["ece"] == 0


def test_most_certain_wrong_and_least_certain_right() -> None:
    found = answered([(0, 1), (0, 0), (1, 0), (1, 1), (0, 1)], [0.6, 0.9, 0.8, 0.7, 0.8], classes=2)
    assert found.most_certain_wrong(2) == [2, 4]
    assert found.least_certain_right(9) == [3, 1]


def test_answers_leave_out_padding_and_replaced_images() -> None:
    """The second batch has an image that replaces a bad one, and padding that repeats the last image."""
    answers = Answers(4, device=torch.device("cpu"))
    logits = {0: [2.0, 0.0, 0.0], 1: [0.0, 0.0, 0.0], 3: [0.0, 0.0, 3.0]}
    for positions, valid in (([0, 1], [True, True]), ([2, 3, 3, 3], [False, True, False, False])):
        images = torch.zeros(len(positions), 3, 1, 1, dtype=torch.uint8)
        labels_B = torch.tensor([position % 3 for position in positions])
        request = Request(0, np.array(positions), np.array(valid))
        batch = Batch(images, labels_B, torch.tensor(valid), request)
        answers.add(batch, torch.tensor([logits.get(position, [9.0, 9.0, 9.0]) for position in positions]))
    found = answers.gather(alone(), num_classes=3)
    assert found.positions_N.tolist() == [0, 1, 3]
    assert found.labels_N.tolist() == [0, 1, 0]
    assert found.predicted_N.tolist() == [0, int(torch.zeros(3).topk(3).indices[0]), 2]
    exp = np.exp([2.0, 0.0, 3.0])
    assert found.confidences_N == pytest.approx(exp / (exp + 2), rel=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_outputs_that_are_not_finite_answer_no_class(value: float) -> None:
    """One rule of accuracy, classes and answers: the second image has no answer, whatever its label."""
    labels_B, valid_B = torch.tensor([1, 0]), torch.tensor([True, True])
    logits_BK = torch.tensor([[0.0, 1.0, 0.0], [value] * 3])
    request = Request(0, np.arange(2), np.array([True, True]))
    batch = Batch(torch.zeros(2, 3, 1, 1, dtype=torch.uint8), labels_B, valid_B, request)
    answers, counts = Answers(2, device=torch.device("cpu")), ClassCounts(("a", "b", "c"), torch.device("cpu"))
    answers.add(batch, logits_BK)
    counts.add(batch, logits_BK)
    found = answers.gather(alone(), num_classes=3)
    assert count_batch(logits_BK, labels_B, valid_B)[:2].tolist() == [1, 1]
    assert counts.worst(alone()) == [{"class": "a", "images": 1, "recall": 0}]
    assert found.is_right_N.tolist() == [True, False]
    assert [each["recall"] for each in found.by_class()] == [0, 1, None]
    assert [each["precision"] for each in found.by_class()] == [None, 1, None]
    report = EvaluationReport(found, ("a", "b", "c"), index=None)
    assert report.record["most_certain_wrong"][0]["predicted"] == NO_ANSWER
    assert list(report._confusions()) == [
        ("class", "a", "b", "c", NO_ANSWER),
        ("a", 0, 0, 0, 1),
        ("b", 0, 1, 0, 0),
        ("c", 0, 0, 0, 0),
    ]
    grid = draw_confusion(found, report._names).axes[0]
    assert (len(grid.get_xticks()), len(grid.get_yticks())) == (4, 3)
