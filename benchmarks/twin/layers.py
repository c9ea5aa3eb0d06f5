"""Make tools/simulate/layers.json: the layers of torchvision's models, and of ours that it lacks."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torchvision.models
from torch import Tensor, nn

from bigbatch.tools.simulate.shapes import LAYERS
from bigbatch.trainer.models.alexnet import alexnet_bn
from bigbatch.trainer.models.resnet9 import resnet9

FILE = Path(__file__).resolve().parents[2] / "tools" / "simulate" / LAYERS
OTHER_OPERATIONS = 8
"""Operations per output element of a layer that is not a product: normalisation, activation, pooling."""

MODELS: Mapping[str, tuple[Callable[[], nn.Module], int]] = {
    # name: (how it is made, pixels of a side)
    **{name: (getattr(torchvision.models, name), 224) for name in ("resnet18", "resnet34", "resnet50", "resnet101")},
    "resnet152": (torchvision.models.resnet152, 224),
    "resnext50": (torchvision.models.resnext50_32x4d, 224),
    "resnext101": (torchvision.models.resnext101_32x8d, 224),
    "mobilenet_v2": (torchvision.models.mobilenet_v2, 224),
    "inception_v3": (lambda: torchvision.models.inception_v3(init_weights=False), 299),
    "googlenet": (lambda: torchvision.models.googlenet(init_weights=False), 224),
    "alexnet": (torchvision.models.alexnet, 224),
    "vgg16": (torchvision.models.vgg16, 224),
    "vgg19": (torchvision.models.vgg19, 224),
    "densenet121": (torchvision.models.densenet121, 224),
    "alexnet_bn": (alexnet_bn, 224),
    "resnet9": (partial(resnet9, num_classes=10), 32),
}


def layers_of(model: nn.Module, *, pixels: int) -> list[tuple[float, list[int]]]:
    """List (millions of operations of one image's forward, elements of each parameter), in the order of forward.

    model: on the meta device. A layer without parameters counts as part of the next one that has some, or of the last.
    """
    batch = 2  # batch norm needs more than one value per channel
    found: list[tuple[float, list[int]]] = []

    def note(module: nn.Module, inputs: object, output: Tensor) -> None:
        found.append((_operations(module, output) / batch, [p.numel() for p in module.parameters()]))

    leaves = [module for module in model.modules() if not list(module.children())]
    handles = [leaf.register_forward_hook(note) for leaf in leaves]
    model.train()
    model(torch.empty(batch, 3, pixels, pixels, device="meta"))
    for handle in handles:
        handle.remove()
    return _merged(found)


def _operations(module: nn.Module, output: Tensor) -> float:
    if isinstance(module, nn.Conv2d):
        return 2 * output.numel() * module.weight[0].numel()
    if isinstance(module, nn.Linear):
        return 2 * output.numel() * module.in_features
    return OTHER_OPERATIONS * output.numel()


def _merged(found: list[tuple[float, list[int]]]) -> list[tuple[float, list[int]]]:
    merged: list[tuple[float, list[int]]] = []
    before = 0.0
    for operations, counts in found:
        before += operations
        if counts:
            merged.append((before, counts))
            before = 0.0
    last, counts = merged[-1]
    merged[-1] = (last + before, counts)
    return [(float(f"{operations / 1e6:.4g}"), counts) for operations, counts in merged]


def all_layers() -> dict[str, list[tuple[float, list[int]]]]:
    stored = {}
    for name, (make, pixels) in MODELS.items():
        with torch.device("meta"):
            model = make()
        stored[name] = layers_of(model, pixels=pixels)
    return stored


def main() -> None:
    lines = (f'"{name}": {json.dumps(layers, separators=(",", ":"))}' for name, layers in all_layers().items())
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"written: {FILE} ({FILE.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main()
