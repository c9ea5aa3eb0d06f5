"""Steps and evaluations beside peers: a public table's settings, torchvision's script, local batches, decoding."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu.suite import torchvision_peer
from benchmarks.gpu.suite.context import TOO_LONG, Context, Found
from benchmarks.gpu.suite.images import like_imagenet, small_images
from benchmarks.gpu.suite.job import (
    AS_TORCH_STARTS,
    CAPTURED,
    COMPILED,
    Contestant,
    Job,
    contestant,
    rates_in_turn,
    seconds_of,
    settings_for,
    turn,
)
from benchmarks.record import ratios
from bigbatch.errors import UserError
from bigbatch.trainer.build import input as build_input
from bigbatch.trainer.inference.accuracy import evaluate
from bigbatch.trainer.input.data_root import open_split
from bigbatch.trainer.input.loaders import dali

CALIBRATION = "ResNet-50, NCHW, AMP"
PUBLISHED = {"NVIDIA H100 80GB HBM3": 2790, "NVIDIA H200": 3079}
"""Driver's name of an SXM card -> images/s.

Source: lambdal/deeplearning-benchmark at aa5addb6, pytorch-train-throughput-v2-fp16.csv.
"""
BATCHES = {80: 1280, 140: 2560}
"""Card's memory in 1e9 bytes -> batch of that table."""
LOSS_SCALE = 256.0
MODES: dict[str, dict[str, Any]] = {"eager": {}, "compile": COMPILED, "cuda_graph": CAPTURED}
MAX_BATCHES_AHEAD = 2
"""Batches ahead of each worker of torch's DataLoader, which are consumed before the clock starts."""
EVALUATIONS = 3
"""Most rounds of evaluations: each takes a minute or more."""


def measure_calibration(context: Context) -> Found:
    """Train torchvision's model on generated images, eager: AMP in fp16, static loss scale, contiguous tensors, SGD.

    The table's script (main.py of NVIDIA's DeepLearningExamples) adds its own metrics and prefetching to that.
    """
    import torchvision

    size, device, found = context.size, context.device, Found()
    batch = batch_for(context)
    model = torchvision.models.get_model(size.model, num_classes=size.num_classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.875, weight_decay=3.05e-5)
    images_BCHW, labels_B = next(
        torchvision_peer.generated_batches(context, batch=batch, memory_format=torch.contiguous_format)
    )

    def run(steps: int) -> None:
        for _ in range(steps):
            with torch.autocast(device.type, dtype=torch.float16, enabled=device.type == "cuda"):
                loss = F.cross_entropy(model(images_BCHW), labels_B, label_smoothing=0.1)
            optimizer.zero_grad()
            (LOSS_SCALE * loss).backward()
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.div_(LOSS_SCALE)
            optimizer.step()

    flags = replace(AS_TORCH_STARTS, cudnn_benchmark=True)
    contestants = {CALIBRATION: Contestant(run, batch, flags=flags)}
    few = replace(size, steps=max(1, size.steps // 4))  # each has five to ten times the images of other parts' steps
    found.add(CALIBRATION, rates_in_turn(contestants, size=few, device=device)[CALIBRATION], unit="images/s")
    found.conditions |= {"batch": batch, "precision": "autocast to fp16"}
    return found


def batch_for(context: Context) -> int:
    """Return the table's batch on this card, or the size's own if the card has less memory than the table's."""
    if context.device.type != "cuda" or context.is_small:
        return context.size.batch
    memory = torch.cuda.get_device_properties(context.device).total_memory / 1e9
    return max((batch for least, batch in BATCHES.items() if memory >= least), default=context.size.batch)


def measure_local_batch(context: Context, *, batch: int) -> Found:
    """Measure a local batch in every mode, in turn. On a GPU even a world of one sums through NCCL."""
    found, contestants = Found(), {}
    with ExitStack() as stack:
        for mode, settings in MODES.items():
            if settings and not context.compiles:
                found.left_out[mode] = TOO_LONG
            else:
                everything = settings_for(context.size, batch=batch, precision=context.precision) | settings
                try:
                    made = contestant(everything, with_nccl=context.device.type == "cuda")
                except UserError as error:
                    found.left_out[mode] = f"not available: {error}"
                    continue
                contestants[mode] = stack.enter_context(closing(made))
        rates = rates_in_turn(contestants, size=context.size, device=context.device)
    for mode, values in rates.items():
        found.add(mode, values, unit="images/s")
    return found


def measure_generated(context: Context) -> Found:
    """Measure with all tensors on the device, so that only the steps count; the contestants take turns."""
    size, found, contestants = context.size, Found(), {}
    peer = torchvision_peer.peer_name(context)
    with ExitStack() as stack:
        for precision in precisions(context):
            made = contestant(fastest(context, precision=precision))
            contestants[precision] = stack.enter_context(closing(made))
        batches = torchvision_peer.generated_batches(context)
        contestants[peer] = torchvision_peer.peer(context, batches, num_classes=size.num_classes)
        rates = rates_in_turn(contestants, size=size, device=context.device)
    describe(found, rates, peer=peer, batch=context.size.batch)
    return found


def measure_images(context: Context) -> Found:
    """Measure from JPEG files: DALI beside torch's DataLoader, each alone with the cores at its turn."""
    found = Found()
    root = context.data or (small_images(context.scratch) if context.is_small else None)
    if root is None:
        found.left_out["pictures"] = "needs a data set: name its folder by --data"
        return found
    peer = torchvision_peer.peer_name(context)
    images = from_files(context, root, loader="dali")
    makers: dict[str, Callable[[], Contestant]] = {
        precision: partial(contestant, fastest(context, precision=precision) | images)
        for precision in precisions(context)
    }
    if (root / "train").is_dir() and any(each.is_dir() for each in (root / "train").iterdir()):
        makers[peer] = lambda: torchvision_peer.peer(
            context, torchvision_peer.image_batches(context, root), num_classes=images["data.num_classes"]
        )
    else:
        found.left_out[peer] = f"reads class folders alone, and {root.name} has shards"
    rates: dict[str, list[float]] = {name: [] for name in makers}
    for _ in range(context.size.rounds):
        for name, make in makers.items():
            with closing(make()) as each:
                rates[name].append(rate_alone(each, context))
    describe(found, rates, peer=peer, batch=context.size.batch)
    return found


def precisions(context: Context) -> tuple[str, ...]:
    """List precisions, without fp16 on a CPU, where it is slow."""
    return (context.precision,) if context.is_small else ("bf16", "fp16")


def fastest(context: Context, *, precision: str) -> dict[str, Any]:
    """Return settings on generated tensors: compiled and captured, except on a CPU; the steps show each alone."""
    settings = settings_for(context.size, batch=context.size.batch, precision=precision)
    return settings | CAPTURED if context.compiles else settings


def from_files(context: Context, root: Path, *, loader: str) -> dict[str, Any]:
    """Return settings of a data set's images."""
    return {
        "data.loader": loader,
        "data.root": str(root),
        "data.num_synthetic_samples": None,
        "data.num_classes": len(open_split(root, "train").classes),
        "data.num_threads": torchvision_peer.num_workers(context),
    }


def rate_alone(each: Contestant, context: Context) -> float:
    """Measure images per second once all batches read ahead have been consumed."""
    ahead = MAX_BATCHES_AHEAD * torchvision_peer.num_workers(context)
    turn(each, steps=ahead + context.size.steps, device=context.device)
    return turn(each, steps=3 * context.size.steps, device=context.device)


def describe(found: Found, rates: dict[str, Any], *, peer: str, batch: int) -> None:
    """Describe rates and seconds of a step of all, and ratios of ours to the peer's, round by round."""
    for name, values in rates.items():
        found.add(name, values, unit="images/s")
        found.add(f"{name} step", [batch / each for each in values], unit="s")
        if peer in rates and name != peer:
            found.add(f"{name} / {peer}", ratios(values, rates[peer]), unit="ratio")


def measure_evaluation(context: Context) -> Found:
    """Time the loader alone, and the evaluation, in turn; the first round is discarded."""
    found, size = Found(), context.size
    made = small_images if context.is_small else lambda scratch: like_imagenet(scratch, num_images=size.eval_images)
    root = context.data or made(context.scratch)
    loader = "dali" if dali.is_installed() else "torchvision"
    settings = settings_for(size, batch=size.batch, precision=context.precision)
    job = Job(settings | from_files(context, root, loader=loader))

    def drain() -> None:
        for _ in build_input.eval_batches(job.config, job.communicator, job.eval_split):
            pass

    def whole() -> None:
        evaluate(
            job.parts.model,
            build_input.eval_batches(job.config, job.communicator, job.eval_split),
            normalize=job.parts.normalize,
            communicator=job.communicator,
            num_samples=job.eval_split.num_samples,
        )

    with closing(job):
        rounds = [
            [seconds_of(action, device=context.device) for action in (drain, whole)]
            for _ in range(1 + min(EVALUATIONS, size.rounds))
        ]
    drained, evaluated = zip(*rounds[1:], strict=True)
    num = job.eval_split.num_samples
    found.add(f"{loader} alone, {num:,} images", drained, unit="s")
    found.add(f"evaluation with {loader}, {num:,} images", evaluated, unit="s")
    found.add("evaluation / decoding", ratios(evaluated, drained), unit="ratio")
    return found
