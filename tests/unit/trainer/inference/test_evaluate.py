"""`bigbatch evaluate` on any weights, at any resolution, by any loader."""

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from error_texts import naming
from PIL import Image
from torch import nn
from torchvision.transforms.v2 import functional as tv

from bigbatch.cli import main
from bigbatch.errors import ConfigError
from bigbatch.parts import load
from bigbatch.trainer.build.job import without_choices
from bigbatch.trainer.config.file import dump_config, load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.inference.arguments import read_trained, trained_parser
from bigbatch.trainer.models import MODELS

RESNET = {"model.options.zero_gamma": True, "model.options.blurpool": False}
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # model: (its keys, what its function takes)
    "resnet18": (RESNET, {}),
    "alexnet_bn": ({}, {}),
    "resnet9": ({"model.options.width": 4}, {"width": 4}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data") / "shapes"
    write_dataset(root, train_per_class=1, val_per_class=2, side_pixels=(80, 100))
    return root


def words(settings: dict[str, Any]) -> list[str]:
    return [f"--{key}={'null' if value is None else value}" for key, value in settings.items()]


def read(argv: list[str]) -> tuple[Namespace, Config, Path]:
    return read_trained(trained_parser("bigbatch evaluate", description=""), argv)


def evaluate(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[dict[str, Any], str]:
    """The record, and the line of accuracy."""
    capsys.readouterr()
    assert main(["evaluate", *argv, "--json"]) == 0
    *lines, record = capsys.readouterr().out.splitlines()
    return json.loads(record), next(line for line in lines if ": evaluation: " in line)


def count_by_hand(model: nn.Module, data: Path, *, size: int, fraction: float, flip: bool) -> tuple[int, float]:
    """Correct answers and mean loss, one image at a time: the middle, resized by Pillow."""
    correct, losses = 0, []
    for label, folder in enumerate(sorted((data / "val").iterdir())):
        for path in sorted(folder.iterdir()):
            image = Image.open(path).convert("RGB")
            side = round(fraction * min(image.size))
            square = tv.resize(tv.center_crop(image, [side, side]), [size, size], antialias=True)
            pixels_1CHW = ((tv.pil_to_tensor(square).float() / 255 - 0.5) / 0.25)[None]
            with torch.no_grad():
                logits = model(pixels_1CHW)
                if flip:
                    logits = (logits + model(pixels_1CHW.flip(3))) / 2
            correct += int(logits.argmax() == label)
            losses.append(float(nn.functional.cross_entropy(logits, torch.tensor([label]))))
    return correct, sum(losses) / len(losses)


def command(
    name: str, weights: Path, data: Path, *, size: int, fraction: float = 0.875, flip: bool = False
) -> list[str]:
    settings = {
        "model.name": name,
        **OPTIONS[name][0],
        "data.root": data,
        "data.loader": "torchvision",
        "data.image_size": size,
        "data.eval_crop_fraction": fraction,
        "data.eval_flip": flip,
        "batch.microbatch_size": 8,
        "batch.bn_span": 8,
    }
    return ["--config", "quickstart", "--weights", str(weights), *words(settings)]


@pytest.mark.parametrize(("name", "size", "flip"), [("resnet9", 40, True), ("resnet9", 57, False)])
def test_evaluate_any_resolution_and_crop(
    name: str, size: int, flip: bool, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = load(MODELS[name])(num_classes=10, **OPTIONS[name][1]).eval()
    others = {name: 0 * tensor for name, tensor in model.state_dict().items()}
    average = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}  # as torchvision's scripts do
    torch.save({"model": others, "model_ema": average} if flip else model.state_dict(), tmp_path / "weights.pt")
    argv = command(name, tmp_path / "weights.pt", data, size=size, fraction=0.75, flip=flip)
    assert main(["export", *argv, "--format=safetensors", f"--out={tmp_path / 'w.safetensors'}"]) == 0
    assert ("the average of the weights is read (model_ema.module)" in capsys.readouterr().out) == flip
    record, line = evaluate(capsys, *argv)
    correct, loss = count_by_hand(model, data, size=size, fraction=0.75, flip=flip)
    assert record["count"] == 20
    assert record["loss"] == pytest.approx(loss, rel=2e-2), "crops of odd sides are rounded by up to a pixel"
    assert abs(record["top1"] * 20 - correct) <= 1
    assert f"weights.pt at {size} x {size} pixels: evaluation: top-1 {100 * record['top1']:.2f}%  top-5 " in line
    assert "(20 images in " in line
    assert sum(each["images"] for each in record["classes"]) == 20
    right = sum(each["images"] for each in record["confusions"] if each["class"] == each["predicted"])
    assert right == record["top1"] * 20


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        ([], ("run folder", "--config", "--weights")),
        (["--config", "quickstart"], ("run folder", "--config", "--weights")),
        (["--weights", "a.pt", "--data.root", "b"], ("run folder", "--config", "--weights")),
        (["--config", "quickstart", "--weights", "a.pt", "--checkpoint", "c"], ("--checkpoint", "run folder")),
        (["runs/a", "--config", "quickstart"], ("runs/a", "--config", "--weights")),
        (["runs/a", "--weights", "a.pt"], ("runs/a", "--config", "--weights")),
    ],
)
def test_evaluate_impossible_command_lines(
    argv: list[str], parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["evaluate", *argv])
    assert re.search(naming(*parts), capsys.readouterr().err.splitlines()[-1])


def test_evaluate_values_of_keys_are_not_taken_for_the_run_folder() -> None:
    argv = ["--data.root", "else/where", "--config", "quickstart", "--weights", "a.pt", "--data.num_threads", "3"]
    arguments, config, weights = read(argv)
    assert arguments.run is None
    assert (config.data.root, config.data.num_threads, weights) == ("else/where", 3, Path("a.pt"))


def test_evaluate_a_microbatch_is_not_refused_for_what_training_asks(tmp_path: Path) -> None:
    mixing = load_config(["--config", "quickstart", "--augment.mixup_alpha", "0.2", "--augment.cutmix_alpha", "1"])
    (tmp_path / "config.yaml").write_text(dump_config(mixing))
    weights = ["--checkpoint", "c"]
    for size in (1, 5000):  # neither fits the span, nor divides the global batch; one has no other to mix with
        for start in ([str(tmp_path), *weights], ["--config", "quickstart", "--weights", "a.pt"]):
            _, config, _ = read([*start, "--batch.microbatch_size", str(size)])
            batch = without_choices(config, world_size=3).batch
            assert (batch.microbatch_size, batch.global_batch_size) == (size, 3 * size)
    with pytest.raises(ConfigError, match=naming("batch.bn_span=3", "batch.microbatch_size=10")):
        read([str(tmp_path), *weights, "--batch.microbatch_size=10", "--batch.bn_span=3"])
    _, config, _ = read([str(tmp_path), *weights])
    assert config == mixing


@pytest.mark.parametrize(("precision", "scale"), [("fp16", 1.0), ("fp16_autocast", 1.0), ("fp32", None)])
def test_evaluate_a_precision_is_not_refused_for_what_training_asks(precision: str, scale: float | None) -> None:
    trained_in_fp16 = ["--config", "cifar10_10epochs", "--weights", "w"]
    _, config, _ = read([*trained_in_fp16, "--optimizer.precision", precision])
    optimizer = config.optimizer
    found = optimizer.precision, optimizer.loss_scale, optimizer.loss_scale_growth_steps
    assert found == (precision, scale, None)


def test_evaluate_options_may_stand_before_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "--data.root", "else/where", str(tmp_path)]) == 1
    assert re.search(naming(f"{tmp_path} ", "config.yaml"), capsys.readouterr().err)
    (tmp_path / "config.yaml").write_text(Path("configs/quickstart.yaml").read_text())
    assert main(["evaluate", "--data.root", "else/where", str(tmp_path)]) == 1
    assert re.search(naming(f"{tmp_path}/checkpoints ", "train"), capsys.readouterr().err)


def test_evaluate_an_option_that_is_not_there_is_named_before_its_value() -> None:
    """Which looks like a run folder."""
    with pytest.raises(ConfigError, match=naming("unknown key lr", "schedule.base_lr")):
        read(["--config", "quickstart", "--weights", "a.pt", "--lr", "3"])
