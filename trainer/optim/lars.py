"""LARS (You et al. 2017, arXiv 1708.03888) in the two published forms, fused over all tensors of a group."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bigbatch.trainer.optim.fused import (
    FusedOptimizer,
    Norms,
    by_adaptation,
    kept_like,
    kernel_settings,
    norms_of,
    one_where_a_norm_is_zero,
    overflow_flag,
    scaled,
    unscaled_grads,
)

MOMENTUM_FORMS = ("lr_inside", "lr_outside")

_CPU_PORTION = 2**19
"""Elements that a CPU updates at a time, 2 MB of fp32: temporary values then stay in the cache."""


class LARS(FusedOptimizer):
    """Does SGD with the learning rate of each tensor scaled by its trust ratio r.

    r = trust_coefficient * |w| / (|g| + weight_decay * |w| + eps); 1 if |w| or |g| is 0.
    With gradient g, weight w, momentum buffer v or u:
    lr_inside (MLPerf's reference):     v = momentum * v + lr * r * (g + weight_decay * w);  w -= v
    lr_outside (NVIDIA's SGDwFASTLARS): u = momentum * u + r * (g + weight_decay * w);       w -= lr * u
    The two agree while lr is constant (v = lr * u) and differ under warm-up. With nesterov, w changes by
    momentum * v plus the term last added to v, instead of by v (the same for u), as in TensorFlow's reference.

    Every setting can differ per parameter group. `adapt=False` fixes r = 1; without `adapt`, parameters of fewer than
    two dimensions (bias and batch norm) have r = 1. param_groups also exempts them from the decay.
    Gradients are not changed. A step on a GPU needs memory for two copies of a group's gradients, three with a
    GradScaler, and for zeros of the size of the largest tensor.
    A GradScaler's scale and overflow flag are applied on the device: step() never waits for it, and an
    overflow leaves weights and momentum untouched.
    Source: mlcommons/training, retired_benchmarks/resnet-tf1 (tf.contrib LARSOptimizer);
    mlcommons/training_results_v4.0, NVIDIA's MXNet optimizer.py.
    """

    _own = ("norms",)
    _numbers = ("lr", "momentum", "weight_decay", "trust_coefficient", "eps")

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        eps: float = 0.0,
        *,
        nesterov: bool = False,
        momentum_form: str = "lr_inside",
        adapt: bool | None = None,
    ) -> None:
        """Check the settings. Raises: ValueError if one is negative or unknown, or if parameters are unusable."""
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "eps": eps,
            "nesterov": nesterov,
            "momentum_form": momentum_form,
            "adapt": adapt,
        }
        super().__init__(params, defaults)
        self.norms: Norms = norms_of
        """Computes norms; replaced if parameters are pieces of tensors, because a trust ratio needs whole tensors."""

    def _problem_with(self, group: dict[str, Any]) -> str | None:
        if group["momentum_form"] not in MOMENTUM_FORMS:
            return f"momentum_form must be one of {', '.join(MOMENTUM_FORMS)}, not {group['momentum_form']!r}"
        return None

    def _update_groups_(self) -> None:
        for weights, group in by_adaptation(self.param_groups):
            # self.norms may be a collective: by portions, ranks would call it different numbers of times, and hang
            is_by_portions = weights[0].device.type == "cpu" and self.norms is norms_of
            update_ = self._update_on_cpu_ if is_by_portions else self._update_at_once_
            update_(weights, group)

    def _update_at_once_(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Update weights that share device and dtype, with the same number of kernels for any number of weights."""
        grads = unscaled_grads(self, weights)
        decayed = list(torch._foreach_add(grads, weights, alpha=group["weight_decay"]))
        updates = scaled(decayed, self._scales(weights, grads, group))
        momenta = kept_like(self, weights) if group["momentum"] else []
        torch._fused_sgd_(weights, updates, momenta, **self._settings(weights[0].device, group))

    def _update_on_cpu_(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """Make the same update in portions that fit the cache, because memory traffic limits a CPU; no read waits."""
        settings = self._settings(weights[0].device, group)
        for some_weights in _portions(weights):
            grads = unscaled_grads(self, some_weights)
            scales = self._scales(some_weights, grads, group).tolist()
            momenta = kept_like(self, some_weights) if group["momentum"] else []
            columns = (some_weights, grads, momenta) if momenta else (some_weights, grads)
            for scale, *tensors in zip(scales, *columns, strict=True):
                # the kernel's own weight decay adds scale * decay * w, which saves a pass over w
                settings["weight_decay"] = group["weight_decay"] * scale
                for weight, grad, *momentum in _pieces(tensors):
                    torch._fused_sgd_([weight], [grad * scale], momentum, **settings)

    def _scales(self, weights: list[Tensor], grads: list[Tensor], group: dict[str, Any]) -> Tensor:
        """Return the factor of each decayed gradient before it enters the momentum."""
        # lr_inside: the momentum contains the rates of earlier steps; lr_outside: the kernel applies the rate
        inner = group["lr"] if group["momentum_form"] == "lr_inside" else 1.0
        if not group["adapt"]:
            return weights[0].new_ones(len(weights)) * inner  # a rate beyond fp32 becomes inf
        w_N, g_N = self.norms([*weights, *grads]).view(2, -1)
        ratios_N = group["trust_coefficient"] * w_N / (g_N + group["weight_decay"] * w_N + group["eps"])
        return one_where_a_norm_is_zero(ratios_N, w_N, g_N) * inner

    def _settings(self, device: torch.device, group: dict[str, Any]) -> dict[str, Any]:
        """Return settings of the kernel that writes weights and momentum."""
        lr = 1.0 if group["momentum_form"] == "lr_inside" else group["lr"]
        chosen = {key: group[key] for key in ("momentum", "nesterov")}
        return kernel_settings(device, lr=lr, overflow=overflow_flag(self, device), **chosen)


def _portions(weights: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield consecutive weights of at most _CPU_PORTION elements together, or a single larger one."""
    portion: list[Tensor] = []
    num_elements = 0
    for weight in weights:
        num_elements += weight.numel()
        if portion and num_elements > _CPU_PORTION:
            yield portion
            portion, num_elements = [], weight.numel()
        portion.append(weight)
    yield portion


def _pieces(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield tensors of one layout; those larger than a portion in flat pieces, in memory order."""
    if tensors[0].numel() <= _CPU_PORTION:
        yield tensors
        return
    flat = (t.as_strided((t.numel(),), (1,)).split(_CPU_PORTION) for t in tensors)
    yield from map(list, zip(*flat, strict=True))
