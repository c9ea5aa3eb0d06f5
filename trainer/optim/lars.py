"""LARS (You et al. 2017, arXiv 1708.03888) in the two published forms, fused over all tensors of a group."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

MOMENTUM_FORMS = ("lr_inside", "lr_outside")
_NON_NEGATIVE = ("lr", "momentum", "weight_decay", "trust_coefficient", "eps")


def trust_ratios(
    weights: list[Tensor], grads: list[Tensor], *, weight_decay: float, trust_coefficient: float, eps: float
) -> Tensor:
    """trust_coefficient * |w| / (|g| + weight_decay * |w| + eps), one per tensor; 1 where |w| or |g| is 0."""
    w_N, g_N = torch.stack(torch._foreach_norm([*weights, *grads])).view(2, -1)
    ratios_N = trust_coefficient * w_N / (g_N + weight_decay * w_N + eps)
    return torch.where((w_N > 0) & (g_N > 0), ratios_N, torch.ones_like(ratios_N))


class LARS(torch.optim.Optimizer):
    """SGD with the learning rate of each tensor scaled by its trust ratio r (see trust_ratios).

    With gradient g, weight w, momentum buffer v or u:
    lr_inside (MLPerf's reference):     v = momentum * v + lr * r * (g + weight_decay * w);  w -= v
    lr_outside (NVIDIA's SGDwFASTLARS): u = momentum * u + r * (g + weight_decay * w);       w -= lr * u
    The two agree while lr is constant (v = lr * u) and differ under warm-up. With nesterov, w changes by
    momentum * v plus v's last summand instead of v (u alike), as in TensorFlow's reference.

    Every setting can differ per parameter group; `adapt=False` fixes r = 1 (bias and batch norm).
    Gradients are only read; a step needs one more copy of a group's gradients, two under a GradScaler.
    A GradScaler's scale and overflow flag are applied on the device: step() never waits for it, and an
    overflow leaves weights and momentum untouched.
    Source: mlcommons/training, retired_benchmarks/resnet-tf1 (tf.contrib LARSOptimizer);
    mlcommons/training_results_v4.0, NVIDIA's MXNet optimizer.py.
    """

    # GradScaler then sets grad_scale and found_inf on us instead of waiting for the flag itself
    _step_supports_amp_scaling = True

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
        adapt: bool = True,
    ) -> None:
        """Raises: ValueError for a setting that is negative or unknown, and for unusable parameters."""
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

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, or leave all as it was. Raises: ValueError as the constructor."""
        super().add_param_group(param_group)
        if problem := _problem_with(self.param_groups[-1]):
            self.param_groups.pop()
            raise ValueError(problem)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient, in place, without a host sync; return closure's loss.

        Raises: ValueError for a gradient that is not dense.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for weights in _by_device_and_dtype(p for p in group["params"] if p.grad is not None):
                self._update_(weights, group)
        return loss

    def _update_(self, weights: list[Tensor], group: dict[str, Any]) -> None:
        """One update of weights that share device and dtype."""
        lr, lr_is_inside = group["lr"], group["momentum_form"] == "lr_inside"
        grads = self._unscaled_grads(weights)
        updates = torch._foreach_add(grads, weights, alpha=group["weight_decay"])
        if group["adapt"]:
            settings = {key: group[key] for key in ("weight_decay", "trust_coefficient", "eps")}
            scales_N = trust_ratios(weights, grads, **settings) * (lr if lr_is_inside else 1.0)
            torch._foreach_mul_(updates, scales_N.unbind())
        elif lr_is_inside:
            torch._foreach_mul_(updates, lr)
        # the kernel of SGD(fused=True): momentum and weights in one pass, and on overflow no write at all
        torch._fused_sgd_(
            weights,
            updates,
            self._momenta(weights) if group["momentum"] else [],
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=1.0 if lr_is_inside else lr,
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=False,
            is_first_step=False,
            found_inf=self._overflow(weights[0].device),
        )

    def _unscaled_grads(self, weights: list[Tensor]) -> list[Tensor]:
        grads = [_grad_of(w) for w in weights]
        scale: Tensor | None = getattr(self, "grad_scale", None)
        if scale is None:
            return grads
        return list(torch._foreach_div(grads, scale.to(weights[0].device, non_blocking=True).view(())))

    def _overflow(self, device: torch.device) -> Tensor | None:
        """The kernel's flag: exactly 1 means skip, while GradScaler's is a sum over devices."""
        found_inf = getattr(self, "found_inf", None)
        return None if found_inf is None else (found_inf > 0).to(device, torch.float32, non_blocking=True)

    def _momenta(self, weights: list[Tensor]) -> list[Tensor]:
        for w in weights:
            buffer = self.state[w].get("momentum_buffer")
            # laid out anew: a loaded state can have another memory format than the model
            buffer = torch.zeros_like(w) if buffer is None else _laid_out_like(w, buffer)
            self.state[w]["momentum_buffer"] = buffer
        return [self.state[w]["momentum_buffer"] for w in weights]


def _by_device_and_dtype(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    buckets: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        buckets[tensor.device, tensor.dtype].append(tensor)
    return list(buckets.values())


def _grad_of(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    if weight.grad.layout is not torch.strided:
        raise ValueError("LARS needs dense gradients: build the embedding with sparse=False")
    return _laid_out_like(weight, weight.grad)


def _laid_out_like(weight: Tensor, tensor: Tensor) -> Tensor:
    """tensor in weight's strides: the fused kernel walks raw memory and on CPU does not check."""
    return tensor if tensor.stride() == weight.stride() else torch.empty_like(weight).copy_(tensor)


def _problem_with(group: dict[str, Any]) -> str | None:
    for key in _NON_NEGATIVE:
        value = group[key]
        if not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            return f"{key} must be a finite number of at least 0, not {value!r}"
    if group["momentum_form"] not in MOMENTUM_FORMS:
        return f"momentum_form must be one of {', '.join(MOMENTUM_FORMS)}, not {group['momentum_form']!r}"
    for weight in group["params"]:
        if weight.dtype not in (torch.float32, torch.float64):
            return (
                f"LARS needs float32 parameters, not {weight.dtype}: keep fp32 master weights "
                "(in half precision the trust ratio drives updates to zero, Jia et al. 2018)"
            )
        if torch.empty_like(weight, device="meta").stride() != weight.stride():
            return "LARS needs parameters that fill their memory without gaps: call .contiguous() on a slice"
    return None
