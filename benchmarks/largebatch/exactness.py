"""Error of LARS and its peers against a float64 oracle written from the formula, after each of 200 random steps.

    python -m benchmarks.largebatch.exactness --out benchmarks/results/lars-exactness.json

A deviation is the largest difference of any element after any step, as a share of the tensor's largest element then.
Ours runs in fp32 and float64, in both momentum forms, with and without Nesterov. Peers run in float64, so that what
remains is a difference of definition, and against the form that they implement, lr_outside: once with their settings
brought as near to the formula as they allow, once with their own eps. --nus names a copy of lars.py of
NUS-HPC-AI-Lab/LARS-ImageNet-PyTorch, which is not on PyPI; without it that row is left out.
"""

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.largebatch.oracle import Oracle
from benchmarks.record import conditions, version_of, write_record
from bigbatch.trainer.optim.lars import LARS, MOMENTUM_FORMS

MOMENTUM, WEIGHT_DECAY, TRUST, BASE_LR = 0.9, 1e-4, 0.001, 10.0
WARMUP_SHARE = 0.25
"""Share of the steps: the momentum forms differ while the rate changes."""


@dataclass(frozen=True)
class Case:
    """A tensor, and the kind of its gradients."""

    name: str
    shape: tuple[int, ...]
    weight_scale: float = 1.0
    grad_scale: float = 1.0
    is_adapted: bool = True
    weight_decay: float = WEIGHT_DECAY


CASES = (
    Case("convolution", (32, 16, 3, 3)),
    Case("larger than a CPU's portion", (1024, 520)),
    Case("one element", (1,)),
    Case("scalar", ()),
    Case("excluded: bias and norm", (64,), is_adapted=False, weight_decay=0.0),
    Case("adapted without decay", (10, 64), weight_decay=0.0),
    Case("excluded with decay", (10, 64), is_adapted=False),
    Case("weight starts at zero", (10, 64), weight_scale=0.0),
    Case("gradient is zero", (10, 64), grad_scale=0.0),
    Case("huge weight and gradient", (10, 64), weight_scale=1e15, grad_scale=1e15),
    Case("tiny weight and gradient", (10, 64), weight_scale=1e-15, grad_scale=1e-15),
    Case("huge weight, tiny gradient", (10, 64), weight_scale=1e15, grad_scale=1e-15),
    Case("tiny weight, huge gradient", (10, 64), weight_scale=1e-15, grad_scale=1e15),
)

Maker = Callable[..., torch.optim.Optimizer]
"""(tensor, case, *, nesterov) -> an optimizer of it. Raises: NotImplementedError for a case that it cannot do."""


def main() -> None:
    """Measure, print a table, write the record."""
    options = parse()
    facts = conditions(options) | {name: version_of(name) for name in ("timm", "torch-optimizer")}
    peers, left_out = available_peers(options.nus)
    deviations = {"bigbatch fp32": own_deviations(torch.float32, steps=options.steps)}
    deviations["bigbatch float64"] = own_deviations(torch.float64, steps=options.steps)
    for name, maker in peers.items():
        deviations[name] = peer_deviations(maker, steps=options.steps)
    for name, by_case in deviations.items():
        print(f"\n{name}", file=sys.stderr)
        for case, value in by_case.items():
            print(f"  {case:30} {'cannot' if value is None else format(value, '.1e')}", file=sys.stderr)
    record = {"benchmark": "lars-exactness", "conditions": facts | {"left_out": left_out}, "deviations": deviations}
    write_record(options.out, record)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--nus", type=Path, help="lars.py of NUS-HPC-AI-Lab/LARS-ImageNet-PyTorch")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: standard output)")
    return parser.parse_args(argv)


def own_deviations(dtype: torch.dtype, *, steps: int) -> dict[str, float | None]:
    """Find the worst over both forms, with and without Nesterov, by case."""
    ways = list(product(MOMENTUM_FORMS, (False, True)))
    return {
        case.name: max(
            deviation(our_maker(form), case, form=form, nesterov=nesterov, dtype=dtype, steps=steps)
            for form, nesterov in ways
        )
        for case in CASES
    }


def peer_deviations(maker: Maker, *, steps: int) -> dict[str, float | None]:
    """Measure the worst with and without Nesterov, if the peer has it; None for a case that it cannot express."""
    found: dict[str, float | None] = {}
    for case in CASES:
        values = []
        for nesterov in (False, True):
            try:
                measured = deviation(
                    maker, case, form="lr_outside", nesterov=nesterov, dtype=torch.float64, steps=steps
                )
            except NotImplementedError:
                continue
            values.append(measured)
        found[case.name] = max(values) if values else None
    return found


def deviation(maker: Maker, case: Case, *, form: str, nesterov: bool, dtype: torch.dtype, steps: int) -> float:
    """Return the deviation described at the top of the file. Both get the same gradients, rounded to dtype."""
    generator = torch.Generator().manual_seed(0)
    start = case.weight_scale * torch.randn(case.shape, generator=generator, dtype=torch.float64)
    weight = start.to(dtype).requires_grad_()
    optimizer = maker(weight, case, nesterov=nesterov)
    oracle = Oracle(
        weight.tolist(),
        momentum=MOMENTUM,
        weight_decay=case.weight_decay,
        eps=0.0,
        form=form,
        adapt=case.is_adapted,
        nesterov=nesterov,
        trust_coefficient=TRUST,
    )
    worst = 0.0
    for lr in rates(steps):
        grad = case.grad_scale * torch.randn(case.shape, generator=generator, dtype=torch.float64)
        weight.grad = grad.to(dtype)
        oracle.step(weight.grad.numpy(), lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
        worst = max(worst, relative(weight.detach(), oracle.weight))
    return worst


def rates(steps: int) -> Iterator[float]:
    """Make a linear warm-up, then polynomial decay of power 2."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    for step in range(steps):
        yield BASE_LR * ((step + 1) / warmup if step < warmup else ((steps - step) / (steps - warmup)) ** 2)


def relative(weight: Tensor, expected: np.ndarray) -> float:
    """Compute the largest difference over the largest expected element; not a number counts as infinite."""
    largest = np.abs(expected).max()
    found = np.abs(weight.double().numpy() - expected).max() / (largest or 1.0)
    return float(found) if np.isfinite(found) else float("inf")


def our_maker(form: str) -> Maker:
    """Return a maker of bigbatch's LARS in that momentum form."""

    def make(weight: Tensor, case: Case, *, nesterov: bool) -> torch.optim.Optimizer:
        group = {"params": [weight], "adapt": case.is_adapted, "weight_decay": case.weight_decay}
        return LARS([group], lr=1.0, momentum=MOMENTUM, trust_coefficient=TRUST, nesterov=nesterov, momentum_form=form)

    return make


def timm_maker(**settings: Any) -> Maker:
    """Return a maker of timm's Lars. always_adapt follows the case, if timm allows it: else weight decay decides."""
    from timm.optim.lars import Lars

    def make(weight: Tensor, case: Case, *, nesterov: bool) -> torch.optim.Optimizer:
        own = {"always_adapt": case.is_adapted} | settings
        common = {"momentum": MOMENTUM, "weight_decay": case.weight_decay, "trust_coeff": TRUST, "nesterov": nesterov}
        return Lars([weight], lr=1.0, **common, **own)

    return make


def torch_optimizer_maker(**settings: Any) -> Maker:
    """Return a maker for the package torch-optimizer, which has LARS from lightning-bolts."""
    from torch_optimizer import LARS as Peer

    def make(weight: Tensor, case: Case, *, nesterov: bool) -> torch.optim.Optimizer:
        common: dict[str, Any] = {"momentum": MOMENTUM, "weight_decay": case.weight_decay, "nesterov": nesterov}
        return Peer([weight], lr=1.0, trust_coefficient=TRUST, **common, **settings)

    return make


def nus_maker(path: Path) -> Maker:
    """Return a maker of the file's Lars. Raises: FileNotFoundError."""
    spec = importlib.util.spec_from_file_location("nus_lars", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def make(weight: Tensor, case: Case, *, nesterov: bool) -> torch.optim.Optimizer:
        if nesterov:
            raise NotImplementedError("no Nesterov")
        group = {"params": [weight], "lars": case.is_adapted}
        return module.Lars([group], lr=1.0, momentum=MOMENTUM, eeta=TRUST, weight_decay=case.weight_decay)

    return make


def available_peers(nus: Path | None) -> tuple[dict[str, Maker], dict[str, str]]:
    """Return the peers that can take part, and why others cannot."""
    makers: dict[str, Callable[[], Maker]] = {
        "timm, eps 0": lambda: timm_maker(eps=0.0),
        "timm, eps 0, foreach": lambda: timm_maker(eps=0.0, foreach=True),
        "timm as it comes": lambda: timm_maker(always_adapt=False),
        "torch-optimizer, eps 0": lambda: torch_optimizer_maker(eps=0.0),
        "torch-optimizer as it comes": torch_optimizer_maker,
    }
    found, left_out = {}, {}
    for name, make in makers.items():
        try:
            found[name] = make()
        except ImportError as error:
            left_out[name] = f"not installed: {error}"
    if nus is None:
        left_out["NUS-HPC-AI-Lab"] = "--nus was not given"
    else:
        found["NUS-HPC-AI-Lab"] = nus_maker(nus)
    return found, left_out


if __name__ == "__main__":
    main()
