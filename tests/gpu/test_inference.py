"""Inference on a GPU: folded, half, compiled; its rate; the commands."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bigbatch.cli import main
from bigbatch.parts import load
from bigbatch.trainer.datasets.generated import write_dataset
from bigbatch.trainer.inference.folding import WARMUP_BATCHES, compile_, for_inference, forward_rate
from bigbatch.trainer.models import MODELS

pytestmark = pytest.mark.gpu


@torch.no_grad()
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_and_compiled_logits_are_those_of_fp32_on_the_cpu(dtype: torch.dtype, is_compiled: bool) -> None:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = load(MODELS["resnet18"])(num_classes=10).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    images_BCHW = torch.randn(8, 3, 64, 64)
    want_BK = model(images_BCHW)
    half = for_inference(model, device=torch.device("cuda"), dtype=dtype, fold=True)
    given_BCHW = images_BCHW.to("cuda", dtype).contiguous(memory_format=torch.channels_last)
    if is_compiled:
        compile_(half, given_BCHW)
    bound = 4 * torch.finfo(dtype).eps / 2 * 21**0.5  # as in tests/unit/trainer/inference/test_folding.py
    assert float((half(given_BCHW).float().cpu() - want_BK).norm() / want_BK.norm()) < bound


def test_rate_waits_for_the_device() -> None:
    """Against CUDA's own clock over the same products, as others may use the GPU now and not a moment later.

    Without waiting it would be the rate of the launches, a hundred times as fast.
    """
    matrix, ends = torch.randn(8192, 8192, device="cuda"), []

    def forward() -> None:
        matrix @ matrix
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()

    rate = forward_rate(forward, num_images=3, device=matrix.device)
    first, *measured = ends[WARMUP_BATCHES:]  # the first one told how many are measured
    seconds = first.elapsed_time(measured[-1]) / 1000
    assert rate == pytest.approx(3 * len(measured) / seconds, rel=0.3)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_dataset(tmp_path / "shapes", train_per_class=1, val_per_class=2)
    torch.manual_seed(0)
    model = load(MODELS["resnet9"])(width=4).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    keys = ["--model.options.width=4", f"--data.root={tmp_path / 'shapes'}", "--data.loader=torchvision"]
    start = ["--config", "quickstart", "--weights", str(tmp_path / "weights.pt"), *keys]
    found = []
    for options in ([], ["--fold", "--compile", "--optimizer.precision=bf16"]):
        assert main(["evaluate", *start, *options, "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    assert found[1]["loss"] == pytest.approx(found[0]["loss"], rel=1e-2)
    images = sorted((tmp_path / "shapes/val").rglob("*.JPEG"))
    assert main(["predict", *start, "--json", "--top=1", *map(str, images)]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = sorted({path.parent.name for path in images})  # the weights keep none
    correct = sum(names[int(a["classes"][0]["class"])] == p.parent.name for a, p in zip(answers, images, strict=True))
    assert correct == round(found[0]["top1"] * 20)
