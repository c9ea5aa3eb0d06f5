"""How near to float64 gradients are that travel in fewer bytes than bf16's, and what their code costs a core.

    python -m benchmarks.comm.compression --data data/imagenette/train --out benchmarks/results/compression.json

One process plays the nodes of a job: each computes a gradient of the real network on pictures of its own, and every way
of benchmarks/comm/compressors.py makes the sum that all would get. Weights move between the steps (SGD), so that
gradients are of a network that learns. Errors are relative, in the 2-norm, against float64: of the last step's sum, and
of the sum of all steps' sums, in which errors that average out, or that feedback brings in later, are small. Bytes are
counted: what one node sends, over fp32's.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from benchmarks.comm.compressors import CODES, Direct, Gathered, HopByHop, PowerSgd, Shape, power_sgd_bytes
from benchmarks.record import conditions, write_record
from bigbatch.trainer.models import build_model

BUFFER_VALUES = 6_553_600
"""Of a fusion buffer: 25 MiB."""
TIMED = ("float16", "bfloat16", "int8", "int8 scaled", "e4m3")
Sum = Callable[[Sequence[Sequence[Tensor]]], list[Tensor]]


def main() -> None:
    """Measure each model, print, write the record."""
    options = parse()
    torch.set_num_threads(1)
    facts = conditions(options)
    models = {name: measure(name, options) for name in options.models}
    record = {"benchmark": "compression", "conditions": facts, "nanoseconds_per_value": time_codes(), "models": models}
    write_record(options.out, record)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="folder with a folder of pictures per class (default: noise)")
    parser.add_argument("--models", nargs="+", default=["resnet50", "alexnet_bn"], help="names that model.name takes")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=2, help="pictures of a node and step")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.02, help="of the updates between them, by SGD")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: standard output)")
    return parser.parse_args(argv)


def ways(tensors: Sequence[Sequence[Shape]], *, nodes: int) -> dict[str, tuple[Sum, float]]:
    """Name each way to sum, with the bytes that a node sends over fp32's 2(n - 1) / n."""
    code = {name: each for name, (each, _) in CODES.items()}
    share = {name: num_bytes / 4 for name, (_, num_bytes) in CODES.items()}
    shapes = [shape for buffer in tensors for shape in buffer]
    full = 4 * max(1, sum(torch.Size(shape).numel() for shape in shapes))
    found: dict[str, tuple[Sum, float]] = {name: (Direct(code[name]), share[name]) for name in CODES}
    found |= {f"{name}, feedback": (Direct(code[name], feedback=True), share[name]) for name in ("int8", "e4m3")}
    found["int8, hop by hop"] = HopByHop(code["int8"]), share["int8"]
    found["int8, gathered"] = Gathered(code["int8"]), share["int8"] * nodes / 2
    for rank in (1, 4):
        found[f"PowerSGD {rank}"] = PowerSgd(tensors, rank), power_sgd_bytes(shapes, rank) / full
    return found


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return errors and bytes of each way, each of which sees the same steps anew: all at once take memory."""
    num_values, rows = 0, {}
    images, labels = draw_pictures(options)
    for way in ways([], nodes=options.nodes):
        torch.manual_seed(0)
        model = build_model(name, num_classes=10, norm=nn.BatchNorm2d)
        parameters = list(reversed(list(model.parameters())))
        buffers = cut([tuple(p.shape) for p in parameters])
        num_values = sum(p.numel() for p in parameters)
        sum_, num_bytes = ways(buffers, nodes=options.nodes)[way]
        rows[way] = {
            "bytes": num_bytes,
            **errors(sum_, steps(model, parameters, buffers, images, labels, options=options)),
        }
        print(name, way, *(f"{what} {value:.3g}" for what, value in rows[way].items()), sep=", ", file=sys.stderr)
    return {"num_values": num_values, "ways": rows}


def errors(sum_: Sum, all_shares: Iterator[list[list[Tensor]]]) -> dict[str, float]:
    """Compare one way's sums with those in float64."""
    lost: list[Tensor] = []
    total: list[Tensor] = []
    row = {}
    for shares in all_shares:
        exact = [torch.zeros_like(buffer, dtype=torch.float64) for buffer in shares[0]]
        for share in shares:
            for exact_N, buffer_N in zip(exact, share, strict=True):
                exact_N += buffer_N
        sums = sum_(shares)
        off = [sum_N.double() - exact_N for sum_N, exact_N in zip(sums, exact, strict=True)]
        lost = [a + b for a, b in zip(lost, off, strict=True)] if lost else off
        total = [a + b for a, b in zip(total, exact, strict=True)] if total else exact
        row = {"error": norm(off) / norm(exact)}
    return row | {"error_of_all_steps": norm(lost) / norm(total)}


def norm(buffers: Sequence[Tensor]) -> float:
    """Compute the 2-norm of all together."""
    return float(sum(buffer.square().sum() for buffer in buffers)) ** 0.5


def cut(shapes: Sequence[Shape]) -> list[list[Shape]]:
    """Share out tensors among buffers, as fusion does."""
    buffers: list[list[Shape]] = [[]]
    for shape in shapes:
        if buffers[-1] and sum(torch.Size(s).numel() for s in (*buffers[-1], shape)) > BUFFER_VALUES:
            buffers.append([])
        buffers[-1].append(shape)
    return buffers


def steps(
    model: nn.Module,
    parameters: Sequence[nn.Parameter],
    buffers: Sequence[Sequence[Shape]],
    images: Tensor,
    labels: Tensor,
    *,
    options: argparse.Namespace,
) -> Iterator[list[list[Tensor]]]:
    """Yield each step's shares, a list of buffers for each node; then learn from their sum."""
    optimizer = torch.optim.SGD(parameters, lr=options.lr, momentum=0.9)
    for step in range(options.steps):
        shares = []
        optimizer.zero_grad(set_to_none=False)
        for node in range(options.nodes):
            start = (step * options.nodes + node) * options.batch
            before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in parameters]
            loss = F.cross_entropy(model(images[start : start + options.batch]), labels[start : start + options.batch])
            (loss / options.nodes).backward()
            flat = [(p.grad - b).flatten() for p, b in zip(parameters, before, strict=True) if p.grad is not None]
            places = iter(flat)
            shares.append([torch.cat([next(places) for _ in buffer]) for buffer in buffers])
        yield shares
        optimizer.step()


def draw_pictures(options: argparse.Namespace) -> tuple[Tensor, Tensor]:
    """Draw as many as all nodes need in all steps, normalised: the data set's, in a random order, or noise."""
    count, generator = options.batch * options.nodes * options.steps, torch.Generator().manual_seed(0)
    size = options.image_size
    if options.data is None:
        return torch.randn(count, 3, size, size, generator=generator), torch.arange(count) % 10
    classes = sorted(path for path in options.data.iterdir() if path.is_dir())[:10]
    files = [(path, label) for label, folder in enumerate(classes) for path in sorted(folder.iterdir())]
    chosen = [files[i] for i in torch.randperm(len(files), generator=generator)[:count].tolist()]
    images = torch.empty(count, 3, size, size)
    for image_CHW, (path, _) in zip(images, chosen, strict=True):
        pixels = Image.open(path).convert("RGB").resize((size, size))
        image_CHW.copy_(
            torch.frombuffer(bytearray(pixels.tobytes()), dtype=torch.uint8).view(size, size, 3).movedim(2, 0)
        )
    return images.div_(255).sub_(0.45).div_(0.225), torch.tensor([label for _, label in chosen])


def time_codes(*, num_values: int = 1 << 19, repetitions: int = 15) -> dict[str, float]:
    """Return the CPU time to round a value and to read it back, in turns, in the size of a ring's segment."""
    values_N = torch.randn(num_values, generator=torch.Generator().manual_seed(0))
    seconds: dict[str, list[float]] = {name: [] for name in TIMED}
    for _ in range(repetitions + 1):
        for name in TIMED:
            start = time.process_time()
            CODES[name][0](values_N)
            seconds[name].append(time.process_time() - start)
    return {name: statistics.median(each[1:]) / num_values * 1e9 for name, each in seconds.items()}


if __name__ == "__main__":
    main()
