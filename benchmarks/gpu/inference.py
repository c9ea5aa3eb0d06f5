"""Images per second of a model alone, for inference, as one speedup after the other is added to it.

    python -m benchmarks.gpu.inference --out benchmarks/results/inference-cuda.json

The forms take turns, batch size by batch size, on the same random images, already on the device; a form's gain is the
median over rounds of its rate divided by that of the form before it in the same round. Peers: torchvision's model as it
comes (convolutions in TF32 where the GPU has it; our fp32 is fp32), the same compiled, and the same with all that needs
no change of the model (half, channels-last, compiled).
Compiling comes before measuring and is timed by itself. Logits are compared with those of the first form.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from benchmarks.gpu.suite.job import AS_TORCH_STARTS
from benchmarks.record import conditions, ratios, spread, table, write_record
from bigbatch.comm.tuning.conditions import device_name
from bigbatch.parts import load
from bigbatch.trainer.config.sections import RESNETS
from bigbatch.trainer.inference.folding import compile_, for_inference, forward_rate, num_norms
from bigbatch.trainer.models import MODELS

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Form:
    """A way to run a model; its gain is over the form named in over."""

    name: str
    over: str | None = None
    theirs: bool = False
    fold: bool = False
    half: bool = False
    channels_last: bool = False
    compile: bool = False


FORMS = (  # each of the first five has the settings of those before it
    Form("eager-fp32"),
    Form("folded", "eager-fp32", fold=True),
    Form("half", "folded", fold=True, half=True),
    Form("channels-last", "half", fold=True, half=True, channels_last=True),
    Form("compiled", "channels-last", fold=True, half=True, channels_last=True, compile=True),
    Form("torchvision", theirs=True),
    Form("torchvision-compiled", "torchvision", theirs=True, compile=True),
    Form(
        "torchvision-half-channels-last-compiled",
        "torchvision",
        theirs=True,
        half=True,
        channels_last=True,
        compile=True,
    ),
)


PEER = "torchvision"
STRICT = replace(AS_TORCH_STARTS, convolutions_in_tf32=False)
"""Flags without TF32: fp32 is then fp32."""


@dataclass(frozen=True)
class Ready:
    """A form of the model on the device, with its images."""

    form: Form
    forward: Callable[[], Tensor]
    compile_seconds: float | None


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print the table, write the record."""
    options = parse(argv)
    facts = {**conditions(options), "device": device_name(torch.device(options.device))}
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    models = make_models(options)
    sizes = [measure(models, batch, options) for batch in options.batches]
    record = {"benchmark": "inference", "conditions": facts, "batch_sizes": sizes}
    print(by_batch(sizes), file=sys.stderr)
    write_record(options.out, record)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line; default sizes fit the device."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--model", choices=RESNETS, default="resnet50" if on_gpu else "resnet18")
    parser.add_argument("--image-size", type=int, default=224 if on_gpu else 64, help="pixels")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32, 256] if on_gpu else [1, 8, 32])
    parser.add_argument("--half", choices=HALF, default="fp16" if on_gpu else "bf16")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch on the CPU")
    parser.add_argument("--only", nargs="+", choices=[form.name for form in FORMS], help="forms, by default all")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    return parser.parse_args(argv)


def make_models(options: argparse.Namespace) -> dict[bool, nn.Module]:
    """Make ours, and theirs (the key is Form.theirs) with the same weights; norms are not the identity."""
    torch.manual_seed(0)
    ours = load(MODELS[options.model])(num_classes=1000).eval()
    for module in ours.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    theirs = torchvision.models.get_model(options.model, num_classes=1000).eval()
    theirs.load_state_dict(ours.state_dict())
    return {False: ours, True: theirs}


def measure(models: dict[bool, nn.Module], batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all forms at one batch size, in turn, in the number of rounds asked for."""
    torch.compiler.reset()  # torch counts compilations of all models, and stops compiling at a limit
    images_BCHW = torch.randn(batch, 3, options.image_size, options.image_size)
    forms = [form for form in FORMS if options.only is None or form.name in options.only]
    ready = [prepare(form, models[form.theirs], images_BCHW, options) for form in forms]
    rates: dict[str, list[float]] = {form.name: [] for form in forms}
    device = torch.device(options.device)
    for _ in range(options.rounds):
        for each in ready:
            switch(each.form)
            rates[each.form.name].append(forward_rate(each.forward, num_images=batch, device=device))
    reference_BK = models[False](images_BCHW)
    return {
        "batch_size": batch,
        "forms": {each.form.name: facts(each, rates, reference_BK=reference_BK) for each in ready},
    }


def switch(form: Form) -> None:
    """Switch to evaluation's settings, or torch's own (convolutions in TF32); cuDNN's search for both. Not on a CPU."""
    flags = AS_TORCH_STARTS if form.theirs else STRICT
    replace(flags, cudnn_benchmark=True).switch()


def prepare(form: Form, model: nn.Module, images_BCHW: Tensor, options: argparse.Namespace) -> Ready:
    """Build, place and compile."""
    device = torch.device(options.device)
    dtype = HALF[options.half] if form.half else torch.float32
    built = for_inference(model, device=device, dtype=dtype, fold=form.fold, channels_last=form.channels_last)
    assert num_norms(built) == 0 or not form.fold
    layout = torch.channels_last if form.channels_last else torch.contiguous_format
    given_BCHW = images_BCHW.to(device=device, dtype=dtype, memory_format=layout)
    seconds = None
    switch(form)
    if form.compile:
        start = time.perf_counter()
        compile_(built, given_BCHW)
        seconds = time.perf_counter() - start
    return Ready(form, lambda: built(given_BCHW), seconds)


def facts(ready: Ready, rates: dict[str, list[float]], *, reference_BK: Tensor) -> dict[str, Any]:
    """Describe rate, gain, and how far the logits are from the first form's, as a share of the largest."""
    own, before = rates[ready.form.name], rates.get(ready.form.over or "")
    logits_BK = ready.forward().float().cpu()
    found: dict[str, Any] = {
        "images_per_second": spread(own),
        "logit_difference": float((logits_BK - reference_BK).abs().max() / reference_BK.abs().max()),
    }
    if before:
        found |= {"gain_over": ready.form.over, "gain": spread(ratios(own, before))}
    if PEER in rates and not ready.form.theirs:
        found["over_torchvision"] = spread(ratios(own, rates[PEER]))
    if ready.compile_seconds is not None:
        found["compile_seconds"] = ready.compile_seconds
    return found


def by_batch(sizes: list[dict[str, Any]]) -> str:
    """Write Markdown: forms by batch sizes, medians of rate, of each step's gain and of the ratio to torchvision."""
    head = ["images/s (gain; over torchvision)", *(f"batch {size['batch_size']}" for size in sizes)]
    return table(head, [[name, *(cell(size["forms"][name]) for size in sizes)] for name in sizes[0]["forms"]])


def cell(form: dict[str, Any]) -> str:
    """Write a cell such as 1,234 (1.25; 2.10)."""
    told = "; ".join(f"{form[key]['median']:.2f}" for key in ("gain", "over_torchvision") if key in form)
    return f"{form['images_per_second']['median']:,.0f}" + (f" ({told})" if told else "")


if __name__ == "__main__":
    main()
