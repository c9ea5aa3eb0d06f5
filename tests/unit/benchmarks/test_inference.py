"""benchmarks.gpu.inference: every form computes the same model, and gains are ratios within a round."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.gpu import inference


@pytest.mark.long
def test_forms_all_take_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With rates that are known: form k of round r makes (k + 1) * 100 * (r + 1) images/s."""
    count = len(inference.FORMS)
    turns: list[int] = []

    def rate(forward: Callable[[], object], *, num_images: int, device: torch.device) -> float:
        assert num_images == 2
        turns.append(len(turns))
        number, form = divmod(turns[-1], count)
        return (form + 1) * 100.0 * (number + 1)

    compile_module = nn.Module.compile
    monkeypatch.setattr(nn.Module, "compile", lambda *a, **k: compile_module(*a, **k, backend="eager"))
    monkeypatch.setattr(inference, "forward_rate", rate)
    out = tmp_path / "out.json"
    words = "--device cpu --model resnet18 --image-size 32 --batches 2 --rounds 3 --half bf16".split()  # noqa: SIM905
    monkeypatch.setattr(sys, "argv", ["inference.py", *words, "--out", str(out)])
    with torch.no_grad():  # the script turns gradients off for its process
        threads = torch.get_num_threads()
        inference.main()
        torch.set_num_threads(threads)
    record = json.loads(out.read_text())
    (size,) = record["batch_sizes"]
    assert len(turns) == 3 * count
    assert list(size["forms"]) == [form.name for form in inference.FORMS]
    for number, (name, form) in enumerate(size["forms"].items()):
        assert form["images_per_second"]["median"] == 200 * (number + 1), name
        assert form["logit_difference"] < (0.05 if "half" in name or number in (3, 4) else 1e-5), name
        assert ("compile_seconds" in form) == name.endswith("compiled")
    assert "gain" not in size["forms"]["eager-fp32"]
    assert [size["forms"][name]["gain"]["median"] for name in ("folded", "compiled")] == [2, 1.25]
    assert size["forms"]["torchvision-compiled"]["gain"]["median"] == pytest.approx(7 / 6, rel=1e-5)
    assert record["conditions"]["device"] == "cpu"
    assert "| folded | 400 (2.00; 0.33) |" in capsys.readouterr().err
