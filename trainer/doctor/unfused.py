"""The update tensor by tensor, as optimizers are commonly written, to measure what fusion is worth beside it."""

import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bigbatch.trainer.build.optimizer import make_optimizer
from bigbatch.trainer.config.sections import OptimizerConfig
from bigbatch.trainer.machine.host import wait_for
from bigbatch.trainer.step.plan import Parts

LEAST_PAIRS = 3
RATE = 1e-6
"""Weights hardly move, so that no number grows until arithmetic with it takes another time."""
GRADIENT = 1e-3
"""Of each weight that has none yet."""

Step = Callable[[], object]


def measure_update(settings: OptimizerConfig, parts: Parts, *, seconds: float) -> dict[str, Any]:
    """Time both forms on copies of the model's weights and gradients, in turns; or say why not. Not collective."""
    if settings.sharded or settings.name not in UNFUSED:
        what = "sharded=True" if settings.sharded else f"name={settings.name}"
        return {"why": f"optimizer.{what} has no form here that works tensor by tensor"}
    device = parts.communicator.device
    steps = [make_step(settings, parts, is_fused=is_fused, lr=RATE)[0] for is_fused in (True, False)]
    for step in steps:
        step()  # allocates momenta
    pairs: list[list[float]] = []
    end = time.perf_counter() + seconds
    while len(pairs) < LEAST_PAIRS or time.perf_counter() < end:
        pairs.append([_timed(step, device) for step in steps])
    fused, unfused = zip(*pairs, strict=True)
    return {
        "fused_seconds": median(fused),
        "unfused_seconds": median(unfused),
        "times": median(b / a for a, b in pairs),
        "turns": len(pairs),
    }


def make_step(
    settings: OptimizerConfig, parts: Parts, *, is_fused: bool, lr: float
) -> tuple[Step, Mapping[str, Tensor]]:
    """Make an optimizer over copies of the weights that parts.optimizer updates; return its step, and the copies."""
    copies = {name: _copy(master) for name, master in parts.precision.masters.items()}
    optimizer = make_optimizer(settings, parts.model, copies, lr=lr)
    return (optimizer.step if is_fused else UNFUSED[settings.name](optimizer)), copies


def _copy(master: Tensor) -> Tensor:
    copied = master.detach().clone()
    copied.grad = torch.full_like(copied, GRADIENT) if master.grad is None else master.grad.detach().clone()
    return copied


def _timed(step: Step, device: torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    step()
    wait_for(device)
    return time.perf_counter() - start


def _torch_by_tensor(optimizer: torch.optim.Optimizer) -> Step:
    """Return the step of torch's optimizer as its loop over tensors."""
    for group in optimizer.param_groups:
        group |= {"fused": False, "foreach": False}
    return optimizer.step


def _lars_by_tensor(optimizer: torch.optim.Optimizer) -> Step:
    """Return LARS as a loop: the formulas of trainer/optim/lars.py, one tensor at a time."""
    momenta = {w: torch.zeros_like(w) for group in optimizer.param_groups for w in group["params"]}

    @torch.no_grad()
    def step() -> None:
        for group in optimizer.param_groups:
            decay, is_inside = group["weight_decay"], group["momentum_form"] == "lr_inside"
            for w in group["params"]:
                ratio = w.new_ones(())
                if group["adapt"]:
                    w_norm, g_norm = w.norm(), w.grad.norm()
                    ratio = group["trust_coefficient"] * w_norm / (g_norm + decay * w_norm + group["eps"])
                    ratio = torch.where((w_norm > 0) & (g_norm > 0), ratio, 1.0)
                added = (w.grad + decay * w) * ratio * (group["lr"] if is_inside else 1.0)
                momentum = momenta[w].mul_(group["momentum"]).add_(added)
                change = added + group["momentum"] * momentum if group["nesterov"] else momentum
                w.sub_(change * (1.0 if is_inside else group["lr"]))

    return step


def _lamb_by_tensor(optimizer: torch.optim.Optimizer) -> Step:
    """Return LAMB as a loop: the formulas of trainer/optim/lamb.py, one tensor at a time."""
    weights = [w for group in optimizer.param_groups for w in group["params"]]
    moments = {w: (torch.zeros_like(w), torch.zeros_like(w)) for w in weights}
    num_steps = 0

    @torch.no_grad()
    def step() -> None:
        nonlocal num_steps
        num_steps += 1
        for group in optimizer.param_groups:
            beta1, beta2 = group["betas"]
            for w in group["params"]:
                mean, square = moments[w]
                mean.lerp_(w.grad, 1 - beta1)
                square.mul_(beta2).addcmul_(w.grad, w.grad, value=1 - beta2)
                root = (square / (1 - beta2**num_steps)).sqrt().add_(group["eps"])
                update = mean / (1 - beta1**num_steps) / root + group["weight_decay"] * w
                if group["adapt"]:
                    w_norm, u_norm = w.norm(), update.norm()
                    update *= torch.where((w_norm > 0) & (u_norm > 0), w_norm / u_norm, 1.0)
                w.sub_(update, alpha=group["lr"])

    return step


UNFUSED: dict[str, Callable[[torch.optim.Optimizer], Step]] = {
    "sgd": _torch_by_tensor,
    "adamw": _torch_by_tensor,
    "lars": _lars_by_tensor,
    "lamb": _lamb_by_tensor,
}
"""By optimizer.name: what makes of a config's optimizer the same step without fusion."""
