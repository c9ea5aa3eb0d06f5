"""Law 3: evaluation counts every picture once, at any world size and batch size."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
import torchvision
from PIL import Image
from torch import nn
from torchvision.transforms.v2 import functional as tv

from bigbatch.trainer.models import build_model
from bigbatch.trainer.run.checkpoint import list_checkpoints, load_checkpoint
from tests.laws.jobs import NUM_CLASSES, VAL_PER_CLASS, alone, copy_of, fails, forked, mpirun, run, train_command


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run(alone(train_command(data, folder, {"data.loader": "torchvision", "run.epochs": 4})))
    return folder


def count_by_hand(data: Path, trained: Path) -> tuple[int, int, float]:
    """Correct answers, pictures and loss (nats) by a plain loop over the files, one picture at a time."""
    state = load_checkpoint(list_checkpoints(trained / "checkpoints")[-1].path)["model"]
    model = build_model("resnet9", num_classes=NUM_CLASSES, norm=partial(nn.BatchNorm2d), width=4)
    model.load_state_dict(state)
    model.eval()
    correct, images, loss = 0, 0, 0.0
    for label, folder in enumerate(sorted((data / "val").iterdir())):
        for path in sorted(folder.iterdir()):
            image = Image.open(path).convert("RGB")
            side = min(image.size)
            square = tv.center_crop(image, [side, side])
            pixels = tv.pil_to_tensor(tv.resize(square, [32, 32], antialias=True)).float() / 255
            with torch.no_grad():
                logits = model(((pixels - 0.5) / 0.25)[None])
            correct += int(logits.argmax() == label)
            loss += float(nn.functional.cross_entropy(logits, torch.tensor([label])))
            images += 1
    return correct, images, loss / images


@pytest.mark.parametrize(("ranks", "microbatch_size"), [(1, 8), (1, 32), (2, 16), (3, 32)])
def test_every_image_counts_once(ranks: int, microbatch_size: int, data: Path, trained: Path) -> None:
    command = ["evaluate", str(trained), "--json", f"--batch.microbatch_size={microbatch_size}"]
    done = run(forked(command, ranks=ranks))
    record = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    correct, images, loss = count_by_hand(data, trained)
    assert images == NUM_CLASSES * VAL_PER_CLASS
    assert record["count"] == images
    assert record["top1"] * images == pytest.approx(correct, abs=1e-9)
    assert record["loss"] == pytest.approx(loss, rel=2e-2), "crops of odd sides are rounded by up to a pixel"


def test_foreign_weights_score_the_same_at_any_world_size(data: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet18(num_classes=NUM_CLASSES).state_dict(), tmp_path / "theirs.pth")
    words = "name=resnet18 width=null pool_first=null logit_scale=null zero_gamma=true blurpool=false"
    options = [f"--data.root={data}", "--data.image_size=40", *(f"--model.{word}" for word in words.split())]
    command = ["evaluate", "--config", "quickstart", "--weights", str(tmp_path / "theirs.pth"), "--json", *options]
    records = []
    for ranks in (1, 2, 3):
        argv = [*command, "--batch.microbatch_size=8", "--batch.bn_span=8"]
        done = run(forked(argv, ranks=ranks))
        records.append(json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{"))))
    assert {record["count"] for record in records} == {NUM_CLASSES * VAL_PER_CLASS}
    assert len({(record["top1"], record["top5"]) for record in records}) == 1
    assert [record["loss"] for record in records] == pytest.approx([records[0]["loss"]] * 3, rel=1e-6)


@pytest.mark.parametrize(("ranks", "microbatch_size"), [(1, 8), (2, 16)])
@pytest.mark.parametrize("number", [0, NUM_CLASSES * VAL_PER_CLASS - 1], ids=["first", "last, which pads"])
def test_bad_image_is_counted_out(
    number: int, ranks: int, microbatch_size: int, data: Path, trained: Path, tmp_path: Path
) -> None:
    damaged = copy_of(data, tmp_path)
    victim = sorted((damaged / "val").glob("*/*"))[number]
    victim.write_bytes(b"no picture")
    options = (f"--data.root={damaged}", f"--batch.microbatch_size={microbatch_size}", "--data.loader=torchvision")
    command = ["evaluate", str(trained), "--json", *options, "--data.max_skipped=3"]
    done = run(forked(command, ranks=ranks))
    record = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert [line for line in done.stdout.splitlines() if line.startswith(f"skipped: {victim}: ")]
    victim.unlink()
    correct, images, _ = count_by_hand(damaged, trained)
    assert record["count"] == images == NUM_CLASSES * VAL_PER_CLASS - 1
    assert record["top1"] * images == pytest.approx(correct, abs=1e-9)


def test_bad_image_that_may_not_be_skipped_ends_the_evaluation(data: Path, trained: Path, tmp_path: Path) -> None:
    damaged = copy_of(data, tmp_path)
    victim = sorted((damaged / "val").glob("*/*"))[40]
    victim.write_bytes(b"no picture")
    assert str(victim) in fails(mpirun(["evaluate", str(trained), f"--data.root={damaged}"], ranks=2))
