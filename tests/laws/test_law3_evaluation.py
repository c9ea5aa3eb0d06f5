"""Law 3: evaluation counts every image once, at any world size and batch size."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision.transforms.v2 import functional as tv

from bigbatch.trainer.checkpoint.checkpoint import load_checkpoint
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.models import build_model
from tests.laws.jobs import (
    NUM_CLASSES,
    TINY,
    TRAIN_PER_CLASS,
    VAL_PER_CLASS,
    alone,
    copy_of,
    fails,
    forked,
    run,
    train_command,
)

SIDE = TINY["data.image_size"]
ROUNDING = 1e-5
"""Rounding of fp32 logits, as a share of the largest (3e-7 was measured), and so of the loss."""


@dataclass(frozen=True)
class Counted:
    """What a plain loop over the files counts; undecided: both best logits are alike up to rounding."""

    correct: int
    undecided: int
    images: int
    loss: float

    def agrees(self, record: dict[str, Any]) -> bool:
        """The same images and as many correct answers: exactly, but for those that rounding may turn over."""
        hits = record["top1"] * self.images
        whole = abs(hits - round(hits)) < 1e-9
        return whole and record["count"] == self.images and 0 <= round(hits) - self.correct <= self.undecided


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that are neither cropped nor resized: every reader hands on the same pixels."""
    root = tmp_path_factory.mktemp("whole") / "shapes"
    write_dataset(root, train_per_class=TRAIN_PER_CLASS, val_per_class=VAL_PER_CLASS, side_pixels=(SIDE, SIDE))
    return root


@pytest.fixture(scope="module")
def trained(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run(alone(train_command(whole, folder, {"data.loader": "torchvision", "run.epochs": 3, "run.seed": 5})))
    return folder


def count_by_hand(data: Path, record: dict[str, Any]) -> Counted:
    """Answers and loss (nats) of the checkpoint that was evaluated, in fp64, one image at a time."""
    state = load_checkpoint(Path(record["checkpoint"]))["model"]
    model = build_model("resnet9", num_classes=NUM_CLASSES, norm=partial(nn.BatchNorm2d), width=4)
    model.load_state_dict(state)
    model.double().eval()
    correct, undecided, images, loss = 0, 0, 0, 0.0
    for label, folder in enumerate(sorted((data / "val").iterdir())):
        for path in sorted(folder.iterdir()):
            image = Image.open(path).convert("RGB")
            side = min(image.size)
            square = tv.center_crop(image, [side, side])
            pixels = tv.pil_to_tensor(tv.resize(square, [SIDE, SIDE], antialias=True)).double() / 255
            with torch.no_grad():
                logits = model(((pixels - 0.5) / 0.25)[None])
            best, second = logits[0].topk(2).values
            is_close = bool(best - second < 2 * ROUNDING * logits.abs().max())
            undecided += is_close
            correct += not is_close and int(logits.argmax()) == label
            loss += float(nn.functional.cross_entropy(logits, torch.tensor([label])))
            images += 1
    return Counted(correct, undecided, images, loss / images)


def evaluated(command: list[str], *, ranks: int) -> dict[str, Any]:
    """What `evaluate --json` prints."""
    done = run(forked(command, ranks=ranks))
    return dict(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))


@pytest.mark.parametrize(("ranks", "microbatch_size"), [(1, 8), (3, 32)])
def test_every_image_counts_once(ranks: int, microbatch_size: int, whole: Path, trained: Path) -> None:
    record = evaluated(["evaluate", str(trained), "--json", f"--batch.microbatch_size={microbatch_size}"], ranks=ranks)
    counted = count_by_hand(whole, record)
    assert counted.images == NUM_CLASSES * VAL_PER_CLASS
    assert counted.agrees(record), (counted, record)
    assert record["loss"] == pytest.approx(counted.loss, rel=ROUNDING)


def test_images_of_any_side_count_once(data: Path, trained: Path) -> None:
    """With odd sides the crop is rounded by up to a pixel, which decides where two classes are nearly alike."""
    record = evaluated(["evaluate", str(trained), "--json", f"--data.root={data}"], ranks=2)
    counted = count_by_hand(data, record)
    assert record["count"] == counted.images == NUM_CLASSES * VAL_PER_CLASS
    assert record["loss"] == pytest.approx(counted.loss, rel=2e-2)


@pytest.mark.long
def test_foreign_weights_score_the_same_at_any_world_size(data: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet18(num_classes=NUM_CLASSES).state_dict(), tmp_path / "theirs.pth")
    options = [f"--data.root={data}", "--data.image_size=40", "--model.name=resnet18"]
    command = ["evaluate", "--config", "quickstart", "--weights", str(tmp_path / "theirs.pth"), "--json", *options]
    records = []
    for ranks in (1, 3):
        records.append(evaluated([*command, "--batch.microbatch_size=8", "--batch.bn_span=8"], ranks=ranks))
    assert {record["count"] for record in records} == {NUM_CLASSES * VAL_PER_CLASS}
    assert len({(record["top1"], record["top5"]) for record in records}) == 1
    assert records[0]["confusions"] == records[1]["confusions"]
    assert [each["image"] for each in records[0]["most_certain_wrong"]] == [
        each["image"] for each in records[1]["most_certain_wrong"]
    ]
    assert [record["loss"] for record in records] == pytest.approx([records[0]["loss"]] * 2, rel=1e-6)


@pytest.mark.parametrize(
    ("number", "ranks", "microbatch_size"),
    [(0, 1, 8), (NUM_CLASSES * VAL_PER_CLASS - 1, 2, 16)],
    ids=["first", "last, which pads"],
)
def test_bad_image_is_counted_out(
    number: int, ranks: int, microbatch_size: int, whole: Path, trained: Path, tmp_path: Path
) -> None:
    damaged = copy_of(whole, tmp_path)
    victim = sorted((damaged / "val").glob("*/*"))[number]
    victim.write_bytes(b"no image")
    options = (f"--data.root={damaged}", f"--batch.microbatch_size={microbatch_size}", "--data.loader=torchvision")
    command = ["evaluate", str(trained), "--json", *options, "--data.max_skipped=3"]
    done = run(forked(command, ranks=ranks))
    record = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert [line for line in done.stdout.splitlines() if line.startswith(f"skipped: {victim}: ")]
    victim.unlink()
    counted = count_by_hand(damaged, record)
    assert counted.images == NUM_CLASSES * VAL_PER_CLASS - 1
    assert counted.agrees(record), (counted, record)


def test_bad_image_that_may_not_be_skipped_ends_the_evaluation(data: Path, trained: Path, tmp_path: Path) -> None:
    damaged = copy_of(data, tmp_path)
    victim = sorted((damaged / "val").glob("*/*"))[40]
    victim.write_bytes(b"no image")
    assert str(victim) in fails(forked(["evaluate", str(trained), f"--data.root={damaged}"], ranks=2))
