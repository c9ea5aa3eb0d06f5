"""fp32, bf16 and fp16: half-precision weights and gradients around fp32 master weights."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

COMPUTE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """The form in which Jia et al. 2018 train: half weights, activations and gradients; fp32 for the rest.

    Batch norm stays fp32. For every half-precision weight there is an fp32 master, which the optimizer
    updates and checkpoints keep. fp16 has dynamic loss scaling (torch.amp.GradScaler); after the gradients
    have been summed all ranks hold the same bits, so all find the same overflow and skip the same update,
    without a host sync.
    """

    def __init__(self, model: nn.Module, *, name: str, device: torch.device) -> None:
        self.compute_dtype = COMPUTE_DTYPES[name]
        masters = {key: p.detach().float().clone() for key, p in model.named_parameters()}
        to_half_(model, self.compute_dtype)
        self._model = model
        self.masters: dict[str, Tensor] = {
            key: p if p.dtype == torch.float32 else nn.Parameter(masters[key]) for key, p in model.named_parameters()
        }
        pairs = [(p, self.masters[key]) for key, p in model.named_parameters() if p is not self.masters[key]]
        self._half: list[Tensor] = [p for p, _ in pairs]
        self._full: list[Tensor] = [master for _, master in pairs]
        for master in self._full:
            master.grad = torch.zeros_like(master)
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def backward(self, loss: Tensor) -> None:
        """Backward of the loss times the loss scale."""
        self.scaler.scale(loss).backward()

    def update_(self, optimizer: torch.optim.Optimizer, *, skip_1: Tensor | None = None) -> None:
        """Unscale the summed gradients in fp32, update the masters, write the half-precision weights.

        Where skip_1 (bool) is true, weights, optimizer and loss scale stay as they are; the host does not wait for it.
        The optimizer must be fused: it then leaves everything as it was when it finds found_inf set.
        """
        if self._half:
            torch._foreach_copy_(_grads(self._full), _grads(self._half))
        if self.scaler.is_enabled():
            self._scaled_update_(optimizer, skip_1)
        else:
            if skip_1 is not None:
                optimizer.found_inf = skip_1.float()  # type: ignore[attr-defined]
            optimizer.step()
        self.write_half_()

    def _scaled_update_(self, optimizer: torch.optim.Optimizer, skip_1: Tensor | None) -> None:
        """GradScaler decides by the gradients alone: so give it an overflow, and undo what it makes of that."""
        state = [t for t in (self.scaler._scale, self.scaler._growth_tracker) if t is not None]
        before = [tensor.clone() for tensor in state]
        if skip_1 is not None:
            _grads(self._full)[0].add_(torch.where(skip_1, math.inf, 0.0))
        self.scaler.unscale_(optimizer)
        self.scaler.step(optimizer)
        self.scaler.update()
        if skip_1 is not None:
            for tensor, old in zip(state, before, strict=True):
                tensor.copy_(torch.where(skip_1, old, tensor).reshape(tensor.shape))

    @torch.no_grad()
    def write_half_(self) -> None:
        """Round the masters into the model's half-precision weights."""
        if self._half:
            torch._foreach_copy_(self._half, self._full)

    def loss_scale(self) -> float:
        """The current loss scale. Waits for the device."""
        return self.scaler.get_scale()

    def is_finite(self) -> bool:
        """Every weight is a number. Waits for the device."""
        return all(bool(master.isfinite().all()) for master in self.masters.values())

    def model_state(self) -> dict[str, Tensor]:
        """The model's state_dict with fp32 masters in place of half-precision weights."""
        return {**self._model.state_dict(), **{key: m.detach() for key, m in self.masters.items()}}

    @torch.no_grad()
    def load_model_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what model_state gave. Raises: RuntimeError listing missing and foreign keys."""
        self._model.load_state_dict(state)
        for key, master in self.masters.items():
            master.copy_(state[key])
        self.write_half_()

    def state_dict(self) -> dict[str, Any]:
        """State of the loss scale."""
        return self.scaler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the loss scale; a run without one leaves nothing to restore."""
        if state and self.scaler.is_enabled():
            self.scaler.load_state_dict(state)


def _grads(tensors: list[Tensor]) -> list[Tensor]:
    return [t.grad for t in tensors if t.grad is not None]


def to_half_(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast all weights but those of norm layers, which stay fp32."""
    for module in model.modules():
        if not isinstance(module, _NormBase):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(dtype)
