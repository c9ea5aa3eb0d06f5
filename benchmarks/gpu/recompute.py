"""The curve of memory against time when residual blocks are computed again in backward instead of kept.

    python -m benchmarks.gpu.recompute --out recompute.json --plot recompute.png

For each number of blocks, counted from the input: what a forward keeps for backward (exact, on any machine: it counts
the bytes of tensors that autograd saves, without weights), on a GPU also the peak of allocated memory in forward and
backward, and images/s of forward and backward, the numbers of blocks taking turns. On a CPU the clock is the processor
time of one thread, to which others on the machine matter less.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from torch import Tensor, nn

from benchmarks.record import at_least, conditions, ratios, run, spread, write_record
from bigbatch.comm.connect import choose_device
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.trainer.config.checks import RESIDUAL_BLOCKS
from bigbatch.trainer.machine.host import set_tf32, wait_for
from bigbatch.trainer.models import build_model
from bigbatch.trainer.models.norm import GhostBatchNorm2d, MicrobatchStatistics, flatten_running_statistics
from bigbatch.trainer.models.regions import recompute_
from bigbatch.trainer.report.summary import device_name
from bigbatch.trainer.step.precision import COMPUTE_DTYPES, in_forward, to_half_

GB = 1e9


def main(argv: Sequence[str] | None = None) -> None:
    options = parse(argv)
    device = choose_device(ALONE)
    clock = "seconds" if device.type == "cuda" else "processor seconds of one thread"
    facts = {**conditions(options), "device": device_name(device), "clock": clock}
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        set_tf32(options.precision == "tf32")
    else:
        torch.set_num_threads(1)
    curve = measure(options, device)
    record = {"benchmark": "recompute", "conditions": facts, "curve": curve}
    for point in curve:
        tell(point, whole=curve[0])
    write_record(options.out, record)
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(record).savefig(options.plot, dpi=120)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [name for name, count in RESIDUAL_BLOCKS.items() if count]
    parser.add_argument("--model", choices=models, default="resnet50")
    parser.add_argument("--precision", choices=sorted(COMPUTE_DTYPES), default="bf16")
    parser.add_argument("--image-size", type=at_least(1), default=224, help="pixels")
    parser.add_argument("--batch", type=at_least(1), default=256, help="images a step")
    parser.add_argument("--blocks", type=int, nargs="+", help="numbers of blocks; default: from 0 to all")
    parser.add_argument("--repetitions", type=at_least(1), default=10, help="steps timed with each number")
    parser.add_argument("--out", type=Path, help="JSON file; default: standard output")
    parser.add_argument("--plot", type=Path, help="PNG file")
    options = parser.parse_args(argv)
    most = RESIDUAL_BLOCKS[options.model]
    options.blocks = sorted({0, *(range(most + 1) if options.blocks is None else options.blocks)})
    if options.blocks[0] < 0 or options.blocks[-1] > most:
        parser.error(f"--blocks: {options.model} has {most} residual blocks")
    return options


def measure(options: argparse.Namespace, device: torch.device) -> list[dict[str, Any]]:
    """Measure a point for each number of blocks. Two steps are discarded; one of these counts memory."""
    dtype = COMPUTE_DTYPES[options.precision]
    shape = (options.batch, 3, options.image_size, options.image_size)
    images_BCHW = torch.randn(shape, device=device, dtype=dtype).contiguous(memory_format=torch.channels_last)
    points = []
    for count in options.blocks:
        kept_bytes = count_kept(make_model(options, device, count), images_BCHW, options.precision)
        peak_bytes = measure_peak(make_model(options, device, count), images_BCHW, options.precision)
        points.append({"recomputed_blocks": count, "kept_bytes": kept_bytes, "peak_bytes": peak_bytes})
    models = {count: make_model(options, device, count) for count in options.blocks}
    seconds: dict[int, list[float]] = {count: [] for count in options.blocks}
    for turn in range(options.repetitions + 2):
        for count in options.blocks if turn % 2 else options.blocks[::-1]:
            took = timed(partial(step, models[count], images_BCHW, options.precision), device)
            if turn >= 2:
                seconds[count].append(took)
    for point in points:
        all_seconds = seconds[point["recomputed_blocks"]]
        point["images_per_second"] = spread([options.batch / each for each in all_seconds])
        point["relative_time"] = spread(ratios(all_seconds, seconds[0]))
    return points


def make_model(options: argparse.Namespace, device: torch.device, count: int) -> nn.Module:
    """Make the model as `bigbatch train` makes it."""
    torch.manual_seed(0)
    norm = partial(GhostBatchNorm2d, bn_span=options.batch, ghosts_per_step=1)
    model = build_model(options.model, num_classes=1000, norm=norm)
    model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    to_half_(model, COMPUTE_DTYPES[options.precision])
    statistics_N = flatten_running_statistics(model)
    MicrobatchStatistics(model, statistics_N, take=statistics_N.lerp_)
    recompute_(model, count)
    return model


def loss_of(model: nn.Module, images_BCHW: Tensor, precision: str) -> Tensor:
    """Compute a loss of one class for all."""
    labels_B = torch.zeros(len(images_BCHW), dtype=torch.int64, device=images_BCHW.device)
    with in_forward(precision, device=images_BCHW.device):
        logits_BK = model(images_BCHW).float()
    return F.cross_entropy(logits_BK, labels_B)


def step(model: nn.Module, images_BCHW: Tensor, precision: str) -> None:
    """Run forward and backward; gradients stay allocated, as in training."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    loss_of(model, images_BCHW, precision).backward()


def count_kept(model: nn.Module, images_BCHW: Tensor, precision: str) -> int:
    """Count bytes saved between forward and backward, each memory once, without weights and images."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), images_BCHW)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss_of(model, images_BCHW, precision)
    return sum(kept.values())


def measure_peak(model: nn.Module, images_BCHW: Tensor, precision: str) -> int | None:
    """Measure bytes allocated at once in a step, weights, gradients and cuDNN's workspace included; None on a CPU."""
    if not images_BCHW.is_cuda:
        return None
    step(model, images_BCHW, precision)  # the first step's search by cuDNN needs more memory
    torch.cuda.reset_peak_memory_stats()
    step(model, images_BCHW, precision)
    return torch.cuda.max_memory_allocated()


def timed(work: Callable[[], None], device: torch.device) -> float:
    """Time until the device has done the work; on a CPU, its processor time."""
    now = time.process_time if device.type == "cpu" else time.perf_counter
    wait_for(device)
    begin = now()
    work()
    wait_for(device)
    return now() - begin


def tell(point: dict[str, Any], *, whole: dict[str, Any]) -> None:
    """Print a line on standard error, beside the record."""
    peak = "" if point["peak_bytes"] is None else f"peak {point['peak_bytes'] / GB:8.3f} GB  "
    print(
        f"{point['recomputed_blocks']:3} blocks  kept {point['kept_bytes'] / GB:8.3f} GB "
        f"({point['kept_bytes'] / whole['kept_bytes']:.2f})  {peak}"
        f"{point['images_per_second']['median']:9,.1f} images/s  time x {point['relative_time']['median']:.2f}",
        file=sys.stderr,
    )


def draw(record: dict[str, Any]) -> Figure:
    """Draw memory and time against the number of blocks, relative to none."""
    curve, facts = record["curve"], record["conditions"]
    blocks = [point["recomputed_blocks"] for point in curve]
    key, what = ("kept_bytes", "kept for backward") if curve[0]["peak_bytes"] is None else ("peak_bytes", "peak memory")
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.plot(blocks, [point[key] / curve[0][key] for point in curve], marker="o", label=what)
    times = [point["relative_time"] for point in curve]
    medians = [each["median"] for each in times]
    errors = [[abs(each["median"] - each[end]) for each in times] for end in ("q1", "q3")]
    axes.errorbar(blocks, medians, yerr=errors, marker="s", capsize=3, label="time of forward and backward")
    options = facts["options"]
    axes.set(
        xlabel="residual blocks computed again, from the input",
        ylabel="relative to none",
        ylim=(0, None),
        title=f"{options['model']}, {options['batch']} images of {options['image_size']} pixels, "
        f"{options['precision']}\n{facts['device']}, n = {times[0]['n']}",
    )
    axes.legend()
    axes.spines[["top", "right"]].set_visible(False)
    return figure


if __name__ == "__main__":
    run(main)
