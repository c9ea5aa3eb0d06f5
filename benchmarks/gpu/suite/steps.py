"""Steps from a plain script to the published record, each with its gain and its share of the roofline."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import conv_flop_count

from benchmarks.gpu.suite.context import TOO_LONG, Context, Found
from benchmarks.gpu.suite.job import (
    COMPILED,
    Contestant,
    contestant,
    in_precision,
    rates_in_turn,
    seconds_of,
    settings_for,
)
from bigbatch.errors import UserError
from bigbatch.trainer.models import build_model

LARS = {
    "optimizer.name": "lars",
    "optimizer.momentum": 0.9,
    "optimizer.options": {"trust_coefficient": 0.001, "eps": 0.0, "momentum_form": "lr_inside", "nesterov": False},
}
UNFUSED = {
    "optimizer.name": "torch.optim.SGD",
    "optimizer.momentum": None,
    "optimizer.options": {"momentum": 0.9},
}
"""The update of torchvision's script. Our own optimizers are always fused."""
DTYPE = torch.bfloat16
PASSES = 3
"""Forward, gradient of the weights, gradient of the input (not for the first layer)."""


@dataclass(frozen=True)
class Step:
    """A change against the steps before."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    reads_loss: bool = True
    """True if the host waits for the loss of each step."""


STEPS = (
    Step("eager fp32", {**in_precision("fp32"), **UNFUSED, "compute.channels_last": False}),
    Step("TF32", in_precision("tf32")),
    Step("AMP", in_precision("bf16_autocast")),
    Step("half weights", in_precision("bf16")),
    Step("channels-last", {"compute.channels_last": True}),
    Step("fused update", LARS),
    Step("no syncs", reads_loss=False),
    Step("compile", COMPILED, reads_loss=False),
    Step("CUDA graph", {"compute.cuda_graph": True}, reads_loss=False),
)
FUSION = "no kernel of our own: what the compiler fuses of it is part of the step compile"


def measure(context: Context) -> Found:
    """Measure all steps in turn, then the roofline of the largest one."""
    size, found = context.size, Found()
    with ExitStack() as stack:
        contestants = make_contestants(context, found, stack=stack)
        rates = rates_in_turn(contestants, size=size, device=context.device)
    for name, values in rates.items():
        found.add(name, values, unit="images/s")
    found.left_out["fused batch norm, add and ReLU"] = FUSION
    layers = layers_of(size.model, batch=size.batch, image_size=size.image_size, num_classes=size.num_classes)
    shortest = measure_peaks(context, found, layers=layers)
    flops = sum(layer.flops for layer in layers) / size.batch
    found.tables["steps"] = make_table(found, list(rates), roofline=size.batch / shortest, flops=flops)
    return found


def make_contestants(context: Context, found: Found, *, stack: ExitStack) -> dict[str, Contestant]:
    """Make the steps that this device supports; steps after an unsupported one do without its change."""
    size, made = context.size, {}
    settings = settings_for(size, batch=size.batch, precision="fp32")
    for step in STEPS:
        changed = settings | step.settings
        if COMPILED.items() <= step.settings.items() and not context.compiles:
            found.left_out[step.name] = TOO_LONG
            continue
        try:
            made[step.name] = stack.enter_context(closing(contestant(changed, reads_loss=step.reads_loss)))
        except UserError as error:
            found.left_out[step.name] = f"not available: {error}"
            continue
        settings = changed
    return made


def make_table(found: Found, names: list[str], *, roofline: float, flops: float) -> list[dict[str, Any]]:
    """Make one row a step. roofline: images per second of the shortest step; flops: of one image."""
    rows, before = [], None
    for name in names:
        rate = found.median(name)
        rows.append(
            {
                "step": name,
                "images/s": rate,
                "times the one before": None if before is None else rate / before,
                "TFLOP/s": rate * flops / 1e12,
                "share of the bf16 roofline": rate / roofline,
            }
        )
        before = rate
    return rows


@dataclass(frozen=True)
class Layer:
    """A convolution, or the classifier as one of 1 x 1, at a batch size."""

    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    num_passes: int = PASSES

    @property
    def flops(self) -> int:
        """Count the operations of all passes; a multiplication and an addition count two."""
        return self.num_passes * conv_flop_count(
            list(self.input_shape), list(self.weight_shape), list(self.output_shape)
        )

    @property
    def elements(self) -> int:
        """Return the elements that all passes read and write, each tensor once per pass."""
        shapes = (self.input_shape, self.weight_shape, self.output_shape)
        return self.num_passes * sum(torch.Size(shape).numel() for shape in shapes)


def layers_of(model: str, *, batch: int, image_size: int, num_classes: int) -> list[Layer]:
    """List the layers with a ResNet's arithmetic, from a forward without memory."""
    layers: list[Layer] = []

    def see(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        (shape,) = (tuple(each.shape) for each in inputs)
        common: dict[str, Any] = {"num_passes": PASSES if layers else PASSES - 1}
        if isinstance(module, nn.Conv2d):
            common |= {"stride": module.stride, "padding": module.padding}
            layers.append(Layer(shape, tuple(module.weight.shape), tuple(output.shape), **common))
        elif isinstance(module, nn.Linear):
            ones = (1, 1)
            layers.append(Layer((*shape, *ones), (*module.weight.shape, *ones), (*output.shape, *ones), **common))

    with torch.device("meta"):
        net = build_model(model, num_classes=num_classes, norm=nn.BatchNorm2d)
        for module in net.modules():
            module.register_forward_hook(see)
        net(torch.empty(batch, 3, image_size, image_size))
    return layers


def shortest_seconds(layers: list[Layer], *, flops_per_s: float, bytes_per_s: float, element_bytes: int) -> float:
    """Return the seconds of all layers; each takes the longer time of its arithmetic and its memory traffic."""
    return sum(max(each.flops / flops_per_s, element_bytes * each.elements / bytes_per_s) for each in layers)


def measure_peaks(context: Context, found: Found, *, layers: list[Layer]) -> float:
    """Add the peaks of product, copy and convolutions alone to found; return the seconds of the shortest step."""
    size = context.size
    products, copies = product_seconds(context), copy_seconds(context)
    torch.backends.cudnn.benchmark = True
    alone = [convolution_seconds(layer, context) for layer in layers]
    found.add("matrix product, bf16", [2e-12 * size.matmul**3 / s for s in products], unit="TFLOP/s")
    found.add("copy on the device", [2e-9 * size.copy_bytes / s for s in copies], unit="GB/s")
    conv_rates = [sum(layer.flops for layer in layers) / sum(each) / 1e12 for each in zip(*alone, strict=True)]
    found.add("convolutions alone, bf16, channels-last", conv_rates, unit="TFLOP/s")
    return shortest_seconds(
        layers,
        flops_per_s=1e12 * found.median("matrix product, bf16"),
        bytes_per_s=1e9 * found.median("copy on the device"),
        element_bytes=DTYPE.itemsize,
    )


def product_seconds(context: Context) -> list[float]:
    """Time the product of two square matrices."""
    side = context.size.matmul
    a, b = (torch.randn(side, side, device=context.device, dtype=DTYPE) for _ in range(2))
    return repeated(lambda: a @ b, context)


def copy_seconds(context: Context) -> list[float]:
    """Time a copy from one part of the device's memory to another."""
    source = torch.zeros(context.size.copy_bytes, dtype=torch.uint8, device=context.device)
    target = torch.empty_like(source)
    return repeated(lambda: target.copy_(source), context)


def convolution_seconds(layer: Layer, context: Context) -> list[float]:
    """Time forward and backward of one layer in channels-last memory."""
    images_BCHW, weight, gradient = (
        torch.randn(shape, device=context.device, dtype=DTYPE).to(memory_format=torch.channels_last)
        for shape in (layer.input_shape, layer.weight_shape, layer.output_shape)
    )
    wanted = [weight.requires_grad_()]
    if layer.num_passes == PASSES:
        wanted.append(images_BCHW.requires_grad_())

    def passes() -> None:
        output = F.conv2d(images_BCHW, weight, stride=layer.stride, padding=layer.padding)
        torch.autograd.grad(output, wanted, gradient)

    return repeated(passes, context)


def repeated(action: Callable[[], object], context: Context) -> list[float]:
    """Measure the seconds of one call, over several repetitions; the first one is discarded."""
    size = context.size

    def calls() -> None:
        for _ in range(size.calls):
            action()

    return [seconds_of(calls, device=context.device) / size.calls for _ in range(size.repeats + 1)][1:]
