"""What sums of integers cost a step, and how near to float64 they and sums over other wires are, on real gradients.

    python -m benchmarks.comm.exact_sums --out benchmarks/results/exact-sums-cpu.json

One rank: a step is some microbatches (forward and backward through the reducer, with and without a grid, taking turns).
What travels is twice the bytes of fp32, whatever is measured here. The errors are of the sum of the microbatches'
gradients, each taken for a rank's, against float64. Pictures are noise. Of int32 there are two forms, with an exponent
for each parameter of the step before: of its largest number in any microbatch, with room for that of all of them, and
of its largest sum, with room for one: the best that there is, as only the sum must fit, but one beyond it is not seen.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.largebatch.lars_step import seconds_of
from benchmarks.record import conditions, ratios, show, spread, write_record
from bigbatch.comm.connection import connect
from bigbatch.comm.gradients.grid import FRACTION_BITS, Grid
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.trainer.models import build_model

MARGIN_BITS = 2
"""A parameter's maximum may be four times that of the step before."""
LOSS_SCALE = 1024.0


def main() -> None:
    """Measure each model, print, write the record."""
    options = parse()
    torch.set_num_threads(options.threads)
    facts = conditions(options)
    models = {name: measure(name, options) for name in options.models}
    write_record(options.out, {"benchmark": "exact_sums", "conditions": facts, "models": models})


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--models", nargs="+", default=["resnet18", "resnet50"], help="names that model.name takes")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16, help="pictures of a microbatch")
    parser.add_argument("--microbatches", type=int, default=4, help="of a step")
    parser.add_argument("--rounds", type=int, default=7, help="of timed steps; 0: measure errors alone")
    parser.add_argument("--steps", type=int, default=3, help="with an update; the last one's sums are compared")
    parser.add_argument("--lr", type=float, default=0.1, help="of these updates, by SGD")
    parser.add_argument("--threads", type=int, default=1, help="of the CPU, as run.reproducible has it")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: standard output)")
    return parser.parse_args(argv)


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds of steps and the share that the grid adds, where there are rounds; and errors of sums."""
    found = step_errors(name, options)
    for kind, each in found["errors"].items():
        print(name, kind, *(f"{what} {error:.3g}" for what, error in each.items()), sep=", ", file=sys.stderr)
    return {**(time_steps(name, options) if options.rounds else {}), **found}


def time_steps(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return milliseconds of steps, and the share that the grid adds."""
    steps = {"fp32": make_step(name, None, options), "grid": make_step(name, Grid(options.microbatches), options)}
    seconds: dict[str, list[float]] = {kind: [] for kind in steps}
    for step in steps.values():
        step()  # the order is learned, and kernels are chosen
    for _ in range(options.rounds):
        for kind, step in steps.items():
            seconds[kind].append(seconds_of(step, device=options.device))
    percent = [100 * (ratio - 1) for ratio in ratios(seconds["grid"], seconds["fp32"])]
    milliseconds = {kind: spread([1e3 * each for each in values]) for kind, values in seconds.items()}
    for kind, values in milliseconds.items():
        print(show(f"{name} {kind}", values, unit="ms"), file=sys.stderr)
    print(show(f"{name} price", spread(percent), unit="%"), file=sys.stderr)
    return {"milliseconds": milliseconds, "price_percent": spread(percent)}


def make_step(name: str, grid: Grid | None, options: argparse.Namespace) -> Callable[[], None]:
    """Make a step without an update, of one rank."""
    model, backward = make_training(name, options)
    alone = connect(env=ALONE, device=torch.device(options.device))
    reducer = GradientReducer(model.named_parameters(), alone, grid=grid)

    def step() -> None:
        reducer.zero_grad()
        for index in range(options.microbatches):
            reducer.is_active = index == options.microbatches - 1
            backward(index)
            if not reducer.is_active:
                reducer.fold()
        reducer.wait()

    return step


def make_training(name: str, options: argparse.Namespace) -> tuple[nn.Module, Callable[[int], None]]:
    """Make a model, and the backward of one of its microbatches, divided as a step's mean is."""
    torch.manual_seed(0)
    model = build_model(name, num_classes=1000, norm=nn.BatchNorm2d).to(options.device)
    shape = (options.microbatches, options.batch, 3, options.image_size, options.image_size)
    images_MBCHW, labels_MB = torch.randn(shape), torch.randint(1000, shape[:2])

    def backward(index: int) -> None:
        logits_BK = model(images_MBCHW[index].to(options.device))
        loss = F.cross_entropy(logits_BK, labels_MB[index].to(options.device), reduction="sum")
        (loss / (options.microbatches * options.batch)).backward()

    return model, backward


def step_errors(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return errors of the last step's sums; int32's exponents are of the maxima of the step before."""
    model, backward = make_training(name, options)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=options.lr)
    sizes = [p.numel() for p in parameters]

    def terms() -> Iterator[Tensor]:
        total_N = torch.zeros(sum(sizes))
        for index in range(options.microbatches):
            model.zero_grad(set_to_none=True)
            backward(index)
            term_N = torch.cat([p.grad.flatten() for p in parameters if p.grad is not None]).cpu()
            total_N += term_N
            yield term_N
        for p, gradient_N in zip(parameters, total_N.split(sizes), strict=True):
            p.grad = gradient_N.view_as(p).to(p.device)
        optimizer.step()

    before = Maxima(sizes)
    for _ in range(options.steps - 1):
        before = Maxima(sizes)
        for term_N in terms():
            before.see(term_N)
    now = Maxima(sizes)
    found = errors(now.watch(terms()), num_terms=options.microbatches, before=before)
    growth = [a / b for a, b in zip(now.of_terms_P.tolist(), before.of_terms_P.tolist(), strict=True) if b > 0]
    return {**found, "largest growth of a parameter's maximum": max(growth)}


class Maxima:
    """Keeps the largest number of each parameter, of sizes: of single terms, and of their total."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.of_terms_P = torch.zeros(len(sizes))
        self._total_N = torch.zeros(sum(sizes))

    def see(self, term_N: Tensor) -> None:
        """Take in a microbatch's gradient, flat."""
        self.of_terms_P = torch.maximum(self.of_terms_P, _largest(term_N, self.sizes))
        self._total_N += term_N

    def watch(self, terms: Iterable[Tensor]) -> Iterator[Tensor]:
        """Pass terms on."""
        for term_N in terms:
            self.see(term_N)
            yield term_N

    @property
    def of_total_P(self) -> Tensor:
        """Return that of the sum of the terms."""
        return _largest(self._total_N, self.sizes)


def _largest(numbers_N: Tensor, sizes: Sequence[int]) -> Tensor:
    return torch.stack([each.abs().max() for each in numbers_N.split(list(sizes))])


class SharedExponent:
    """Adds up as int32: each parameter's numbers are multiples of one power of two, of which largest_P (fp32) decides.

    room: how many numbers as large as largest_P times 2**MARGIN_BITS have to fit.
    """

    def __init__(self, largest_P: Tensor, *, room: int, sizes: Sequence[int]) -> None:
        # a parameter without gradients so far gets the fixed grid's
        bits_P = [
            math.floor(math.log2((2**31 - 1) / room / 2**MARGIN_BITS / largest)) if largest > 0 else FRACTION_BITS
            for largest in largest_P.tolist()
        ]
        scale_P = torch.tensor([2.0 ** min(bits, 126) for bits in bits_P])
        self._scale_N = scale_P.repeat_interleave(torch.tensor(sizes))
        self._limit = (2**31 - 1) // room
        self.sums_N = torch.zeros(sum(sizes), dtype=torch.int64)
        """Of int32's numbers; wider, so that a total beyond int32 can be counted."""
        self.num_beyond = self.num_lost = 0

    def add_(self, term_N: Tensor) -> None:
        """Add a term; what is beyond its share of the room is counted."""
        steps_N = (term_N * self._scale_N).round_()
        self.num_beyond += int((steps_N.abs() > self._limit).sum())
        self.num_lost += int(term_N.count_nonzero() - steps_N.count_nonzero())
        self.sums_N += steps_N.to(torch.int64)

    def read(self) -> Tensor:
        """Return the sums as fp32."""
        return self.sums_N.float() / self._scale_N


def errors(terms: Iterable[Tensor], *, num_terms: int, before: Maxima) -> dict[str, Any]:
    """Return the relative errors of each way to add the terms up, and the shares of numbers that a grid takes for 0."""
    count = sum(before.sizes)
    exact_N = torch.zeros(count, dtype=torch.float64)
    plain_N, fp16_N, scaled_fp16_N, bf16_N = (torch.zeros(count) for _ in range(4))
    grid, sums_N, counts_2 = Grid(num_terms), torch.zeros(count + 1, dtype=torch.int64), torch.zeros(2).long()
    by_terms = SharedExponent(before.of_terms_P, room=num_terms, sizes=before.sizes)
    by_total = SharedExponent(before.of_total_P, room=1, sizes=before.sizes)
    for term_N in terms:
        exact_N += term_N.double()
        plain_N += term_N
        # as comm.reduce_dtype=fp32 does it between nodes of one rank: terms and result are rounded to the wire
        fp16_N += term_N.half()
        scaled_fp16_N += (term_N * LOSS_SCALE).half()
        bf16_N += term_N.bfloat16()
        grid.add_(sums_N, term_N, counts_2=counts_2)
        by_terms.add_(term_N)
        by_total.add_(term_N)
    on_grid_N = torch.empty(count)
    grid.read_(on_grid_N, sums_N)
    sums = {
        "fp32": plain_N,
        "grid": on_grid_N,
        "int32, room for all terms": by_terms.read(),
        "int32, room for the total": by_total.read(),
        "fp16 wire": fp16_N.half().float(),
        f"fp16 wire, loss scale {LOSS_SCALE:g}": scaled_fp16_N.half().float() / LOSS_SCALE,
        "bf16 wire": bf16_N.bfloat16().float(),
    }
    num_lost, num_nonzero = counts_2.tolist()
    return {
        "errors": {kind: relative_errors(sum_N, exact_N, sizes=before.sizes) for kind, sum_N in sums.items()},
        "bytes an element": {kind: _element_bytes(kind) for kind in sums},
        "share not 0": num_nonzero / (num_terms * count),
        "share lost below the grid": num_lost / num_nonzero,
        "share lost below int32's steps": by_terms.num_lost / num_nonzero,
        "terms beyond int32's room": by_terms.num_beyond,
        "totals beyond int32": int((by_total.sums_N.abs() > 2**31 - 1).sum()),
    }


def _element_bytes(kind: str) -> int:
    return 8 if kind == "grid" else 2 if "wire" in kind else 4


def relative_errors(sum_N: Tensor, exact_N: Tensor, *, sizes: Sequence[int]) -> dict[str, float]:
    """Return ||sum - exact|| / ||exact|| of all and of the worst parameter, and the largest by the largest number."""
    wrong_N = sum_N.double() - exact_N
    pairs = zip(wrong_N.split(list(sizes)), exact_N.split(list(sizes)), strict=True)
    return {
        "l2": float(wrong_N.norm() / exact_N.norm()),
        "l2 of the worst parameter": max(float(w.norm() / e.norm()) for w, e in pairs if e.count_nonzero()),
        "largest": float(wrong_N.abs().max() / exact_N.abs().max()),
    }


if __name__ == "__main__":
    main()
