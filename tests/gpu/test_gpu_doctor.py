"""The doctor on a GPU: syncs of its own tensors, and an examination of generated tensors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bigbatch.trainer.doctor.syncs import FindSyncs

pytestmark = pytest.mark.gpu


def test_syncs_of_device_tensors_are_found_and_those_of_the_host_are_not() -> None:
    device = torch.device("cuda")
    on_device, on_host = torch.ones(3, device=device), torch.ones(3)
    with FindSyncs(device) as syncs:
        on_host.sum().item()
        on_device.sum().item()
        on_device.cpu()
        on_device[on_device > 0].sum()
    assert sorted(found.partition(": ")[2].split()[0] for found in syncs.found) == ["copies", "counts", "reads"]


def test_examination_tells_how_long_the_gpu_works(tmp_path: Path) -> None:
    options = {
        "data.loader": "synthetic",
        "data.num_synthetic_samples": 512,
        "data.image_size": 32,
        "optimizer.precision": "fp16",
        "optimizer.loss_scale": 256.0,
        "optimizer.loss_scale_growth_steps": "null",
    }
    words = ["doctor", "--config", "quickstart", "--quick", "--seconds", "0.2", "--only", "microbatch"]
    words += [f"--{key}={value}" for key, value in options.items()] + ["--json", str(tmp_path / "found.json")]
    subprocess.run([sys.executable, "-m", "bigbatch", *words], check=True, timeout=280)
    found = json.loads((tmp_path / "found.json").read_text())
    assert 0 < found["profile"]["busy_share"] <= 1
    assert found["profile"]["syncs"] == {}
    assert found["profile"]["operators"][0][1] > 0
    assert sum(found["profile"]["phases"].values()) == pytest.approx(found["profile"]["seconds"], rel=0.05)
    assert all(row["measured"] for row in found["rows"])
