"""Base of bigbatch's fused optimizers: gradients and flags in the form that torch's fused kernels need."""

import copy
import math
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

Norms = Callable[[list[Tensor]], Tensor]
"""Returns the L2 norm of each tensor, in one vector; of whole tensors, even if this rank holds parts of them only."""


def norms_of(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norm (N) of each tensor, if this rank has all of it."""
    return torch.stack(torch._foreach_norm(tensors))


class FusedOptimizer(torch.optim.Optimizer):
    """Checks every group, reads GradScaler's flags on the device, and supports deepcopy; subclasses update."""

    # GradScaler then sets grad_scale and found_inf on us instead of waiting for the flag itself
    _step_supports_amp_scaling = True
    _own: ClassVar[tuple[str, ...]] = ()
    """Attributes besides torch's; a copy shares them, since objects that communicate cannot be copied."""
    _numbers: ClassVar[tuple[str, ...]] = ("lr", "momentum", "weight_decay")
    """Settings of a group that are finite numbers of at least 0."""
    _kept: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    """Entries of a weight's state: step is a scalar, others have the weight's shape; momentum 0 keeps none."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; an error leaves all groups unchanged. Raises: ValueError, as the constructor."""
        super().add_param_group(param_group)
        _untraced(type(self))  # before a compiler traces a step
        group = self.param_groups[-1]
        problems = [problem_with_number(key, group[key]) for key in self._numbers]
        problems += [_problem_with_weights(group["params"], asked_by=type(self).__name__), self._problem_with(group)]
        if problem := next(filter(None, problems), None):
            # torch appends the group before this class can check it
            self.param_groups.pop()
            raise ValueError(problem)
        num_vectors = sum(len(shape_of(w)) < 2 for w in group["params"])
        if group.get("adapt", True) is None and group["weight_decay"] and num_vectors:
            decay, name = f"weight_decay={group['weight_decay']:g}", type(self).__name__
            warnings.warn(
                f"{name}: {num_vectors} of {len(group['params'])} parameters have fewer than two dimensions, such as "
                f"bias and norm. They do not adapt, but they decay ({decay}), against the published rule: pass "
                f"bigbatch.param_groups(model, {decay}) to {name}, or state adapt in the group",
                stacklevel=2,
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an optimizer of this class, for the same model.

        Raises: ValueError, before any change, for the state of another class or of other weights.
        """
        for ours, theirs in zip(self.param_groups, state_dict["param_groups"], strict=False):
            if missing := sorted(self.defaults.keys() - theirs.keys()):
                raise self._another_state(f"its groups have no {', '.join(missing)}")
            if (form := theirs.get("momentum_form")) and "momentum_form" not in self.defaults:
                raise self._another_state(f"its momentum has the form {form} of LARS")
            for weight, key in zip(ours["params"], theirs["params"], strict=False):
                kept = {name: value for name, value in state_dict["state"].get(key, {}).items() if value is not None}
                if not kept:
                    continue
                expected = self._shapes(weight, theirs)
                if kept.keys() | {"momentum_buffer"} & expected.keys() != expected.keys():
                    raise self._another_state(f"a weight keeps {', '.join(kept)}, not {', '.join(expected)}")
                for name, value in kept.items():
                    if (shape := getattr(value, "shape", None)) != expected[name]:
                        what = f"{name} of weight {key} has shape {None if shape is None else tuple(shape)}"
                        raise self._another_state(f"{what}, not {tuple(expected[name])}")
        super().load_state_dict(state_dict)

    def _another_state(self, reason: str) -> ValueError:
        remedy = "make a new optimizer, which starts without momentum"
        return ValueError(f"this state is not of {type(self).__name__} for these weights: {reason}; {remedy}")

    def _shapes(self, weight: Tensor, group: dict[str, Any]) -> dict[str, torch.Size]:
        """Return the shape of each entry of a weight's state."""
        shape = shape_of(weight)  # a state_dict has whole tensors
        return {name: torch.Size() if name == "step" else shape for name in self._kept}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update every parameter that has a gradient, in place; return closure's loss.

        Raises: ValueError for a gradient that is not dense.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        _untraced(type(self))(self)
        return loss

    def _problem_with(self, group: dict[str, Any]) -> str | None:
        """Return why a group cannot be updated, or None; the caller checks its numbers and its weights' memory."""
        raise NotImplementedError

    def _update_groups_(self) -> None:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in self._own}}

    def __deepcopy__(self, memo: dict[int, Any]) -> "FusedOptimizer":
        memo.update({id(getattr(self, name)): getattr(self, name) for name in self._own})
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied


def _untraced(kind: type[FusedOptimizer]) -> Callable[[Any], None]:
    """Return the update of all groups, outside of torch.compile: the compiler cannot trace fused kernels.

    Without the compiler, a slow import, nothing traces.
    """
    if kind not in _UNTRACED and "torch._dynamo" in sys.modules:
        why = f"{kind.__name__} is fused already: compile the model alone, and call step() outside of it"
        _UNTRACED[kind] = torch.compiler.disable(kind._update_groups_, reason=why)
    return _UNTRACED.get(kind, kind._update_groups_)


_UNTRACED: dict[type[FusedOptimizer], Callable[[Any], None]] = {}


def shape_of(weight: Tensor) -> torch.Size:
    """Return the shape of a weight, or of the whole tensor that it is a part of."""
    return getattr(weight, "whole_shape", weight.shape)


def by_adaptation(groups: Iterable[Mapping[str, Any]]) -> Iterator[tuple[list[Tensor], dict[str, Any]]]:
    """Yield weights that one kernel can update, and their group's settings, in which `adapt` is True or False.

    If a group does not state it, weights of two and more dimensions adapt, and bias and norm do not.
    """
    for group in groups:
        for adapts in (True, False):
            stated = group["adapt"]
            some = [w for w in group["params"] if (len(shape_of(w)) > 1 if stated is None else bool(stated)) is adapts]
            for weights in by_device_and_dtype(some):
                yield weights, {**group, "adapt": adapts}


def by_device_and_dtype(weights: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the weights that have a gradient, in one list per device and dtype: one kernel updates a list."""
    buckets: dict[Any, list[Tensor]] = defaultdict(list)
    for weight in weights:
        if weight.grad is not None:
            buckets[weight.device, weight.dtype].append(weight)
    return list(buckets.values())


def unscaled_grads(optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> list[Tensor]:
    """Return the gradients in their weights' layout, divided by the loss scale: copies if there is one.

    Raises: ValueError for a gradient that is not dense.
    """
    grads = [w.grad for w in weights if w.grad is not None]
    if any(grad.layout is not torch.strided for grad in grads):
        raise ValueError(f"{type(optimizer).__name__} needs dense gradients: build the embedding with sparse=False")
    grads = [laid_out_like(w, grad) for w, grad in zip(weights, grads, strict=True)]
    scale: Tensor | None = getattr(optimizer, "grad_scale", None)
    if scale is None:
        return grads
    return list(torch._foreach_div(grads, scale.to(weights[0].device, non_blocking=True).view(())))


def overflow_flag(optimizer: torch.optim.Optimizer, device: torch.device) -> Tensor | None:
    """Return the kernels' flag, () fp32, or None: they skip a step at exactly 1, and GradScaler's sums over devices."""
    found_inf = getattr(optimizer, "found_inf", None)
    return None if found_inf is None else (found_inf > 0).to(device, torch.float32, non_blocking=True).view(())


def one_where_a_norm_is_zero(ratios_N: Tensor, w_N: Tensor, u_N: Tensor) -> Tensor:
    """Return the trust ratios of tensors with these norms of weights and of gradients or updates."""
    # also hides the NaN of 0 / 0, which ratios_N may hold there
    return torch.where((w_N > 0) & (u_N > 0), ratios_N, torch.ones_like(ratios_N))


def scaled(tensors: list[Tensor], factors_N: Tensor) -> list[Tensor]:
    """Return tensors, each times its own factor; may overwrite the inputs."""
    if tensors[0].device.type == "cpu":
        # on a CPU a loop is cheap, and new memory at every step is expensive
        torch._foreach_mul_(tensors, factors_N.unbind())
        return tensors
    return scaled_on_gpu(tensors, factors_N)


def scaled_on_gpu(tensors: list[Tensor], factors_N: Tensor) -> list[Tensor]:
    """Return copies of tensors, each times its own factor: in one launch, with as many zeros as the largest tensor has.

    torch._foreach_mul_ would launch a kernel per tensor: it fuses factors on the host only. _foreach_addcmul fuses
    factors on the device (torch 2.11 and later), so the products are added to zeros.
    """
    zeros_M = tensors[0].new_zeros(max(t.numel() for t in tensors))
    # all of them share the same memory, which is only read
    zeros = [zeros_M.as_strided(t.size(), t.stride()) for t in tensors]
    return list(torch._foreach_addcmul(zeros, factors_N.unbind(), tensors))


PLAIN_SGD: dict[str, Any] = {
    **dict.fromkeys(("momentum", "dampening", "weight_decay"), 0.0),
    **dict.fromkeys(("nesterov", "maximize", "is_first_step"), False),
}
"""Settings of the kernel of SGD(fused=True) with which it only subtracts lr * update."""


def kernel_settings(
    device: torch.device, *, lr: float | Tensor, overflow: Tensor | None, **settings: float
) -> dict[str, Any]:
    """Return settings of the kernel of SGD(fused=True), which writes nothing if overflow is 1; others as PLAIN_SGD."""
    if isinstance(lr, Tensor):
        lr = lr.to(device, torch.float32, non_blocking=True).view(())
    return {**PLAIN_SGD, "lr": lr, "found_inf": overflow, **settings}


def write_(weights: list[Tensor], updates: list[Tensor], momenta: list[Tensor], **settings: Any) -> None:
    """Update momenta and weights, in place, by the kernel of SGD(fused=True) with these kernel_settings."""
    torch._fused_sgd_(weights, updates, momenta, **kernel_settings(weights[0].device, **settings))


def laid_out_like(weight: Tensor, tensor: Tensor) -> Tensor:
    """Return tensor, or a copy, in weight's strides: fused kernels walk raw memory, and check strides on a GPU only."""
    return tensor if tensor.stride() == weight.stride() else torch.empty_like(weight).copy_(tensor)


def kept_like(optimizer: torch.optim.Optimizer, weights: list[Tensor], key: str = "momentum_buffer") -> list[Tensor]:
    """Return entry key of each weight's state, in the weight's layout; zeros if there is none yet."""
    for w in weights:
        kept = optimizer.state[w].get(key)
        # a loaded state can have another memory format than the model
        optimizer.state[w][key] = torch.zeros_like(w) if kept is None else laid_out_like(w, kept)
    return [optimizer.state[w][key] for w in weights]


def zeros_like_all(weights: list[Tensor]) -> list[Tensor]:
    """Return zeros in the weights' layouts, by one kernel for all: torch.zeros_like would launch one per tensor."""
    zeros = [torch.empty_like(w) for w in weights]
    torch._foreach_zero_(zeros)
    return zeros


def count_steps_(optimizer: torch.optim.Optimizer, weights: list[Tensor]) -> list[Tensor]:
    """Return the step count of each weight, () fp32 on the weight's device; 0 if it has none yet."""
    for w in weights:
        state = optimizer.state[w]
        # load_state_dict leaves a step on the device of the loaded state
        step = state["step"] if "step" in state else torch.zeros((), device=w.device)
        state["step"] = step.to(w.device, torch.float32)
    return [optimizer.state[w]["step"] for w in weights]


def _problem_with_weights(weights: Iterable[Tensor], *, asked_by: str) -> str | None:
    """Return why an optimizer cannot update one of these weights, or None."""
    for weight in weights:
        if weight.dtype not in (torch.float32, torch.float64):
            return (
                f"{asked_by} needs float32 parameters, not {weight.dtype}: keep fp32 master weights "
                "(half precision rounds small updates away, Jia et al. 2018)"
            )
        # empty_like keeps strides of dense tensors only: kernels would walk into the gaps of others
        if torch.empty_like(weight, device="meta").stride() != weight.stride():
            return f"{asked_by} needs parameters that fill their memory without gaps: call .contiguous() on a slice"
    return None


def problem_with_number(key: str, value: object, *, below: float = math.inf) -> str | None:
    if key == "lr" and isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta:
        value = float(value)
    if isinstance(value, int | float) and 0 <= value < below:
        return None
    legal = "a finite number of at least 0" if below == math.inf else f"a number of at least 0 and below {below:g}"
    return f"{key} must be {legal}, not {value!r}"


def problem_with_betas(group: dict[str, Any]) -> str | None:
    betas = group["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        return f"betas must be two numbers, such as (0.9, 0.99), not {betas!r}"
    return next(filter(None, (problem_with_number("betas", beta, below=1) for beta in betas)), None)
