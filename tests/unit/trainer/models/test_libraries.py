"""Weights that torchvision and timm have downloaded are found where these keep them, and nothing is downloaded."""

import sys
from pathlib import Path

import pytest
import torch
from error_texts import naming

from bigbatch.errors import CheckpointError
from bigbatch.trainer.models.libraries import cached_weights

constants = pytest.importorskip("huggingface_hub.constants")


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf"))
    return tmp_path


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


@pytest.mark.parametrize(
    ("name", "file"),
    [  # as their download pages name the files
        ("torchvision:resnet18", "resnet18-f37072fd.pth"),
        ("torchvision:resnet50", "resnet50-11ad3fa6.pth"),
        ("torchvision:resnet50.IMAGENET1K_V1", "resnet50-0676ba61.pth"),
        ("timm:resnet18.a1_in1k", "resnet18_a1_0-d63eafa0.pth"),
    ],
)
def test_cached_weights_of_torch_hub(name: str, file: str, caches: Path) -> None:
    library, _, model = name.partition(":")
    with pytest.raises(CheckpointError, match=naming(name, library, "python -c", model.partition(".")[0])):
        cached_weights(name)
    path = put(caches / "hub/checkpoints" / file)
    assert cached_weights(name) == path


def test_cached_weights_of_the_hugging_face_hub(caches: Path) -> None:
    folder = caches / "hf/models--timm--resnet18.a1_in1k"
    put(folder / "refs/main").write_text("abc")
    pickled = put(folder / "snapshots/abc/pytorch_model.bin")
    assert cached_weights("timm:resnet18") == pickled
    tensors = put(folder / "snapshots/abc/model.safetensors")
    assert cached_weights("timm:resnet18") == tensors, "as timm itself prefers them"


@pytest.mark.parametrize(
    "name",
    ["torchvision:resnet19", "torchvision:resnet50.V9", "timm:resnet19", "timm:test_vit9", "timm:resnet18.no_such_tag"],
)
def test_cached_weights_that_do_not_exist(name: str, caches: Path) -> None:
    with pytest.raises(CheckpointError, match=naming(name, "no such weights", "resnet50")):
        cached_weights(name)


def test_cached_weights_without_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(CheckpointError, match=naming("timm:resnet18", "pip install timm")):
        cached_weights("timm:resnet18")
