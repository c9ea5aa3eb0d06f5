"""LARS on one tensor in float64, line by line from its formula; shares no code with the tested optimizer."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np


class Oracle:
    """Follows You et al. 2017 with the conventions of MLPerf's reference (lr_inside) or NVIDIA's (lr_outside).

    r = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps), and 1 without adapt or where |w| or |g| is 0;
    lr_inside:  v = momentum * v + lr * r * (g + weight_decay * w);  w -= v
    lr_outside: v = momentum * v + r * (g + weight_decay * w);       w -= lr * v
    nesterov: v's last summand + momentum * v stands in for v in w's update.
    """

    def __init__(
        self,
        weight: Sequence[Any] | np.ndarray,
        *,
        momentum: float,
        weight_decay: float,
        eps: float,
        form: str,
        adapt: bool,
        nesterov: bool,
        trust_coefficient: float = 0.001,
    ) -> None:
        self.weight, self.buffer = np.array(weight, np.float64), np.zeros_like(weight, np.float64)
        self.momentum, self.weight_decay, self.eps = momentum, weight_decay, eps
        self.form, self.adapt, self.nesterov, self.eta = form, adapt, nesterov, trust_coefficient

    def step(self, grad: Sequence[Any] | np.ndarray, lr: float) -> None:
        """Make one update of weight, in place of the old one."""
        grad = np.array(grad, np.float64)
        weight_norm, grad_norm = math.sqrt((self.weight**2).sum()), math.sqrt((grad**2).sum())
        ratio = 1.0
        if self.adapt and weight_norm > 0 and grad_norm > 0:
            ratio = self.eta * weight_norm / (grad_norm + self.weight_decay * weight_norm + self.eps)
        inner, outer = (lr, 1.0) if self.form == "lr_inside" else (1.0, lr)
        change = inner * ratio * (grad + self.weight_decay * self.weight)
        self.buffer = self.momentum * self.buffer + change
        change = change + self.momentum * self.buffer if self.nesterov else self.buffer
        self.weight = self.weight - outer * change
