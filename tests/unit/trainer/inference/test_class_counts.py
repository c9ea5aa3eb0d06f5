"""The worst classes of a run's last evaluation: counted by hand, and as `bigbatch evaluate` tells them."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from browser import faults, needs_browser
from tiny_training import TINY_OPTIONS, bigbatch

from bigbatch.comm.connect import connect
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.inference.class_counts import ClassCounts
from bigbatch.trainer.report.ending import closing_lines


def batch(labels: list[int], valid: list[bool]) -> Any:
    return SimpleNamespace(labels_B=torch.tensor(labels), valid_B=torch.tensor(valid))


def test_worst_classes_are_those_with_the_least_share_of_right_answers_of_valid_images() -> None:
    counts = ClassCounts(("a", "b", "c", "d", "no images", "right"), torch.device("cpu"))
    answers = [0, 1, 0, 2, 0, 0, 5]
    counts.add(batch([0, 1, 1, 2, 2, 3, 5], [True] * 7), torch.eye(6)[answers])
    counts.add(batch([1, 0, 0, 2, 2], [True, True, False, True, True]), torch.eye(6)[[0, 0, 3, 3, 2]])
    with connect(env=ALONE) as alone:
        worst = counts.worst(alone)
    # a: 2 of 2, the invalid one is none; b: 1 of 3; c: 2 of 4; d: 0 of 1
    assert worst == [
        {"class": "d", "images": 1, "recall": 0.0},
        {"class": "b", "images": 3, "recall": 1 / 3},
        {"class": "c", "images": 4, "recall": 0.5},
    ]
    lines = closing_lines({"worst_classes": worst}, Path("run"), num_classes=6)
    assert "worst     d 0.0%, b 33.3%, c 50.0% right" in lines


def test_logits_that_are_no_answer_are_not_right() -> None:
    counts = ClassCounts(("a", "b"), torch.device("cpu"))
    counts.add(batch([0, 0, 0], [True] * 3), torch.tensor([[torch.nan, 0], [torch.inf, 0], [0, -torch.inf]]))
    with connect(env=ALONE) as alone:
        assert counts.worst(alone) == [{"class": "a", "images": 3, "recall": 1 / 3}]


@pytest.mark.parametrize("damage", ["x", [1], [{"class": "a"}], [{"recall": None}], {}])
def test_edited_worst_classes_are_left_out(damage: object) -> None:
    lines = closing_lines({"worst_classes": damage}, Path("run"), num_classes=6)
    assert not [line for line in lines if line.startswith("worst")]


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run on two ranks, of which each counts a part, and its classes as `bigbatch evaluate` collects them."""
    folder = tmp_path_factory.mktemp("evaluated")
    write_dataset(folder / "data", train_per_class=8, val_per_class=7, side_pixels=(24, 32))
    options = [*TINY_OPTIONS[2:], "--data.loader=torchvision", f"--data.root={folder / 'data'}", "--run.epochs=2"]
    ended = bigbatch("train", "--config", "quickstart", *options, f"--run.directory={folder / 'run'}", ranks=2)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    done = bigbatch("evaluate", str(folder / "run"), "--json")
    return folder / "run", json.loads(done.stdout.splitlines()[-1])["classes"]


@pytest.mark.long
def test_summary_names_the_worst_classes_as_evaluate_does(evaluated: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, classes = evaluated
    worst = json.loads((folder / "summary.json").read_text())["worst_classes"]
    shares = {each["class"]: each["recall"] for each in classes}
    assert [each["recall"] for each in worst] == sorted(shares.values())[:3]
    assert all(each["recall"] == pytest.approx(shares[each["class"]]) and each["images"] == 7 for each in worst)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert not [each for each in records if "worst_classes" in each]


@needs_browser
@pytest.mark.long
@pytest.mark.parametrize("width", [1280, 400])
def test_page_of_an_evaluation_in_a_browser(evaluated: tuple[Path, list[dict[str, Any]]], width: int) -> None:
    """Nothing overlaps or is wider than the window, and each image loads from the folder."""
    page = evaluated[0] / "evaluation/index.html"
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", page.read_text())
    assert faults(page, width=width) == ""
