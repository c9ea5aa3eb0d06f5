"""Steps from a plain script to the published record, each with its gain and its share of the roofline."""

from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from benchmarks.gpu.suite.context import TOO_LONG, Context, Found
from benchmarks.gpu.suite.job import COMPILED, Contestant, contestant, in_precision, rates_in_turn, settings_for
from benchmarks.gpu.suite.roofline import layers_of, measure_peaks
from bigbatch.errors import UserError

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
    """Make the steps that this device supports; later steps leave out the others, too."""
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
