"""Error of LARS and its peers against a float64 oracle written from the formula, over 200 steps on random gradients.

    python -m benchmarks.largebatch.lars_exactness --out benchmarks/results/lars-exactness.json

A deviation is the largest difference of any element after any step, divided by the tensor's largest element then. Ours
is the worst over both momentum forms, with and without Nesterov; peers run in float64, against the form lr_outside.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import timm.optim.lars
import torch
import torch_optimizer
from torch import Tensor

from benchmarks.largebatch.lars_oracle import Oracle
from benchmarks.record import at_least, conditions, run, version_of, write_record
from bigbatch.trainer.optim.lars import LARS, MOMENTUM_FORMS

MOMENTUM, TRUST, BASE_LR, WARMUP_SHARE = 0.9, 0.001, 10.0, 0.25


@dataclass(frozen=True)
class Case:
    """A tensor, and the kind of its gradients."""

    shape: tuple[int, ...] = (10, 64)
    weight_scale: float = 1.0
    grad_scale: float = 1.0
    is_adapted: bool = True
    weight_decay: float = 1e-4


CASES = {
    "convolution": Case((32, 16, 3, 3)),
    "adapted without decay": Case(weight_decay=0.0),
    "excluded with decay": Case(is_adapted=False),
    "gradient is zero": Case(grad_scale=0.0),
    "tiny weight and gradient": Case(weight_scale=1e-15, grad_scale=1e-15),
    "huge weight, tiny gradient": Case(weight_scale=1e15, grad_scale=1e-15),
}
Maker = Callable[[Tensor, Case, bool, str], torch.optim.Optimizer]
"""(tensor, case, Nesterov, momentum form) -> an optimizer of it."""


def ours(weight: Tensor, case: Case, nesterov: bool, form: str) -> torch.optim.Optimizer:
    group = {"params": [weight], "adapt": case.is_adapted, "weight_decay": case.weight_decay}
    return LARS([group], lr=1.0, momentum=MOMENTUM, trust_coefficient=TRUST, nesterov=nesterov, momentum_form=form)


def of_timm(weight: Tensor, case: Case, nesterov: bool, _: str, **settings: Any) -> torch.optim.Optimizer:
    common = {"momentum": MOMENTUM, "weight_decay": case.weight_decay, "trust_coeff": TRUST, "nesterov": nesterov}
    return timm.optim.lars.Lars([weight], lr=1.0, **common, **settings)


def of_timm_without_eps(weight: Tensor, case: Case, nesterov: bool, form: str) -> torch.optim.Optimizer:
    return of_timm(weight, case, nesterov, form, eps=0.0, always_adapt=case.is_adapted)


def of_torch_optimizer(weight: Tensor, case: Case, nesterov: bool, _: str) -> torch.optim.Optimizer:
    common: dict[str, Any] = {"momentum": MOMENTUM, "weight_decay": case.weight_decay, "nesterov": nesterov}
    return torch_optimizer.LARS([weight], lr=1.0, trust_coefficient=TRUST, eps=0.0, **common)


CONTESTANTS: dict[str, tuple[Maker, torch.dtype, Sequence[str]]] = {
    "bigbatch fp32": (ours, torch.float32, MOMENTUM_FORMS),
    "bigbatch float64": (ours, torch.float64, MOMENTUM_FORMS),
    "timm, eps 0": (of_timm_without_eps, torch.float64, ("lr_outside",)),
    "timm as it comes": (of_timm, torch.float64, ("lr_outside",)),
    "torch-optimizer, eps 0": (of_torch_optimizer, torch.float64, ("lr_outside",)),
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=at_least(4), default=200, help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file for the results (default: standard output)")
    options = parser.parse_args(argv)
    facts = conditions(options) | {name: version_of(name) for name in ("timm", "torch-optimizer")}
    deviations = {
        name: {
            which: max(deviation(make, case, *way, dtype, options.steps) for way in product((False, True), forms))
            for which, case in CASES.items()
        }
        for name, (make, dtype, forms) in CONTESTANTS.items()
    }
    write_record(options.out, {"benchmark": "lars-exactness", "conditions": facts, "deviations": deviations})


def deviation(make: Maker, case: Case, nesterov: bool, form: str, dtype: torch.dtype, steps: int) -> float:
    """Compare an optimizer with the oracle; both get the same gradients, rounded to dtype."""
    generator = torch.Generator().manual_seed(0)
    start = case.weight_scale * torch.randn(case.shape, generator=generator, dtype=torch.float64)
    weight = start.to(dtype).requires_grad_()
    optimizer = make(weight, case, nesterov, form)
    settings = {"momentum": MOMENTUM, "weight_decay": case.weight_decay, "eps": 0.0, "trust_coefficient": TRUST}
    oracle = Oracle(weight.tolist(), form=form, adapt=case.is_adapted, nesterov=nesterov, **settings)
    worst = 0.0
    for lr in rates(steps):
        grad = case.grad_scale * torch.randn(case.shape, generator=generator, dtype=torch.float64)
        weight.grad = grad.to(dtype)
        oracle.step(weight.grad.numpy(), lr)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        found = np.abs(weight.detach().double().numpy() - oracle.weight).max() / (np.abs(oracle.weight).max() or 1.0)
        worst = max(worst, float(found) if np.isfinite(found) else float("inf"))
    return worst


def rates(steps: int) -> Iterator[float]:
    """Make a linear warm-up, then polynomial decay of power 2: the momentum forms differ while the rate changes."""
    warmup = max(1, round(WARMUP_SHARE * steps))
    for step in range(steps):
        yield BASE_LR * ((step + 1) / warmup if step < warmup else ((steps - step) / (steps - warmup)) ** 2)


if __name__ == "__main__":
    run(main)
