"""ResNet-50 at 224 in bf16 and fp16, on generated tensors and on images, beside torchvision's reference script."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.suite import torchvision_peer
from benchmarks.gpu.suite.context import Context, Found
from benchmarks.gpu.suite.images import small_images
from benchmarks.gpu.suite.job import CAPTURED, Contestant, contestant, rates_in_turn, settings_for, turn
from benchmarks.record import ratios
from bigbatch.trainer.input.shards import open_split

MOST_BATCHES_AHEAD = 2
"""Batches ahead of each worker of torch's DataLoader, which are consumed before the clock starts."""


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
    num_classes = len(open_split(root, "train").classes)
    makers: dict[str, Callable[[], Contestant]] = {
        precision: partial(ours, context, root, precision=precision, num_classes=num_classes)
        for precision in precisions(context)
    }
    if (root / "train").is_dir() and any(each.is_dir() for each in (root / "train").iterdir()):
        makers[peer] = lambda: theirs(context, root, num_classes=num_classes)
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


def ours(context: Context, root: Path, *, precision: str, num_classes: int) -> Contestant:
    """Feed our step by DALI."""
    images = {
        "data.loader": "dali",
        "data.root": str(root),
        "data.num_synthetic_samples": None,
        "data.num_classes": num_classes,
        "data.num_threads": torchvision_peer.num_workers(context),
    }
    return contestant(fastest(context, precision=precision) | images)


def theirs(context: Context, root: Path, *, num_classes: int) -> Contestant:
    """Feed the script's epoch by torch's DataLoader."""
    batches = torchvision_peer.image_batches(context, root)
    return torchvision_peer.peer(context, batches, num_classes=num_classes)


def rate_alone(each: Contestant, context: Context) -> float:
    """Measure images per second once all batches read ahead have been consumed."""
    ahead = MOST_BATCHES_AHEAD * torchvision_peer.num_workers(context)
    turn(each, steps=ahead + context.size.steps, device=context.device)
    return turn(each, steps=3 * context.size.steps, device=context.device)


def describe(found: Found, rates: dict[str, Any], *, peer: str, batch: int) -> None:
    """Describe rates and seconds of a step of all, and ratios of ours to the peer's, round by round."""
    for name, values in rates.items():
        found.add(name, values, unit="images/s")
        found.add(f"{name} step", [batch / each for each in values], unit="s")
        if peer in rates and name != peer:
            found.add(f"{name} / {peer}", ratios(values, rates[peer]), unit="ratio")
