"""LARS as Jia et al. 2018 (arXiv 1807.11205) say not to do it: all in fp16.

python -m bigbatch train --config quickstart --optimizer.name benchmarks.largebatch.half_lars.HalfLARS ...

For the ablation of mixed-precision LARS, and for the test that shows why it is needed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class HalfLARS(torch.optim.Optimizer):
    """Does v = momentum * v + lr * r * (g + weight_decay * w); w -= v; every operand and result rounded to fp16.

    The parameters may be fp32, such as master weights: after a step they hold numbers of fp16. Norms are summed in
    fp32 and then rounded, which is more than the hardware of 2018 did. adapt=False fixes r = 1.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        *,
        adapt: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update_(weight, group)
        return loss

    def _update_(self, weight: Tensor, group: dict[str, Any]) -> None:
        w, g = weight.half(), weight.grad.half()  # type: ignore[union-attr]
        rate = torch.tensor(group["lr"], dtype=torch.float16, device=w.device)
        if group["adapt"]:
            rate = rate * trust_ratio(w, g, group)
        momentum = self.state[weight].setdefault("momentum_buffer", torch.zeros_like(w))
        momentum.mul_(group["momentum"]).add_(rate * (g + group["weight_decay"] * w))
        weight.copy_(w - momentum)


def trust_ratio(w: Tensor, g: Tensor, group: dict[str, Any]) -> Tensor:
    """Compute trust_coefficient * |w| / (|g| + weight_decay * |w|) in fp16; 1 if |w| or |g| is 0."""
    w_norm, g_norm = (torch.linalg.vector_norm(t.float()).half() for t in (w, g))
    ratio = group["trust_coefficient"] * w_norm / (g_norm + group["weight_decay"] * w_norm)
    return torch.where((w_norm > 0) & (g_norm > 0), ratio, torch.ones_like(ratio))
