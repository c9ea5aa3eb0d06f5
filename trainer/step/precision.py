"""Precision of training: half weights with fp32 masters, autocast of fp32 weights, TF32, fp32."""

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from bigbatch.comm.gradients.trained_set import require_summed
from bigbatch.comm.gradients.written import versions
from bigbatch.parts import load

if TYPE_CHECKING:
    from bigbatch.trainer.step.loss_scale import Scaling

COMPUTE_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16_autocast": torch.float32,
    "fp16_autocast": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
"""Precision -> dtype of the model's images, and of its weights except in norm layers."""

AUTOCAST_DTYPES = {"bf16_autocast": torch.bfloat16, "fp16_autocast": torch.float16}
"""Precision -> dtype to which autocast rounds the inputs of convolutions and matrix products."""
TRAINED_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of parameters that can be trained, and that precision rounds; those of other dtypes stay as they are."""
CLIP_EPS = 1e-6
"""Added to the norm, as in torch.nn.utils.clip_grad_norm_."""


class MasterWeights(Protocol):
    """fp32 weights that the optimizer updates: whole on every rank, or (sharded.py) a part on each.

    Every rank calls each method.
    """

    masters: Mapping[str, Tensor]
    """fp32 tensors that the optimizer updates, by the names of the model's parameters."""
    replicated: Mapping[str, Tensor]
    """Masters that every rank holds whole."""
    are_apart: bool
    """Whether a master is another tensor than the model's parameter: then gradients and weights are copied."""

    def fetch_grads_(self) -> None:
        """Copy half-precision gradients into those of the masters."""

    def publish_(self) -> None:
        """Write the masters into the model's weights; wait_for_weights waits until all are there."""

    def wait_for_weights(self) -> None:
        """Wait until the model has the weights of publish_."""

    def norms(self, tensors: list[Tensor]) -> Tensor:
        """Return the L2 norms (N) of whole tensors, from this rank's pieces of them."""
        ...

    def half_grads(self) -> list[Tensor]:
        """List the half-precision gradients of this rank's weights."""
        ...

    def sum_parts(self, counts_N: Tensor) -> Tensor:
        """Return the counts of whole weights from those of this rank's pieces."""
        ...

    def whole(self) -> dict[str, Tensor]:
        """Return every master, whole."""
        ...

    def load_(self, state: Mapping[str, Tensor]) -> None:
        """Copy whole tensors, by name, into the masters, and publish them."""


class WholeWeights:
    """Weights that are whole on every rank. The masters of fp32 parameters are the parameters themselves."""

    def __init__(self, model: nn.Module, masters: Mapping[str, Tensor]) -> None:
        self.masters: Mapping[str, Tensor] = dict(masters)
        self.replicated: Mapping[str, Tensor] = self.masters
        pairs = [(p, masters[key]) for key, p in model.named_parameters() if key in masters and p is not masters[key]]
        self._half: list[Tensor] = [p for p, _ in pairs]
        self._full: list[Tensor] = [master for _, master in pairs]
        self.are_apart = bool(pairs)
        self._make_grads()
        self._grads: list[int] | None = None
        """Versions of the masters' gradients, to notice a zero_grad() of the optimizer; None within an update."""
        self._note_versions()

    def _note_versions(self) -> None:
        self._published, self._updated = versions(self._half), versions(self._full)
        if self._grads is None:
            self._grads = versions(grads_of(self._full))

    def start_backward_(self) -> None:
        """Raises: ValueError if other code has updated the masters, or written other weights into the model."""
        self._require_published()
        if self._grads != versions(grads_of(self._full)):  # by zero_grad() of the optimizer
            for grad in grads_of(self._half):
                grad.zero_()
            self._make_grads()
            self._grads = versions(grads_of(self._full))

    def fetch_grads_(self) -> None:
        """Raises: ValueError if other code has written other weights into the model."""
        if self._half:
            require_summed(self._half, by="Precision")
            self._require_published()
            self._make_grads()  # again after a zero_grad() of the optimizer
            torch._foreach_copy_(grads_of(self._full), grads_of(self._half))
            self._grads = None

    @torch.no_grad()
    def publish_(self) -> None:
        if self._half:
            torch._foreach_copy_(self._half, self._full)
            self._note_versions()

    def _make_grads(self) -> None:
        for master in self._full:
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    def _require_published(self) -> None:
        is_updated = versions(self._full) != self._updated
        if is_updated or versions(self._half) != self._published:
            load("bigbatch.trainer.step.divergence.require_published")(self._half, self._full, is_updated=is_updated)
            self._published = versions(self._half)

    def wait_for_weights(self) -> None:
        pass

    def norms(self, tensors: list[Tensor]) -> Tensor:
        return torch.stack(torch._foreach_norm(tensors))

    def half_grads(self) -> list[Tensor]:
        return grads_of(self._half)

    def sum_parts(self, counts_N: Tensor) -> Tensor:
        return counts_N

    def whole(self) -> dict[str, Tensor]:
        return {key: master.detach() for key, master in self.masters.items()}

    @torch.no_grad()
    def load_(self, state: Mapping[str, Tensor]) -> None:
        for key, master in self.masters.items():
            master.copy_(state[key])
        self.publish_()


def grads_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [t.grad for t in tensors if t.grad is not None]


class Precision:
    """Trains as Jia et al. 2018 (half-precision weights, activations and gradients), by autocast, or in fp32.

    Autocast uses half precision for activations only. Batch norm stays fp32. Every half-precision weight has an fp32
    master, which the optimizer updates and checkpoints keep; checkpoints keep the fp32 values of frozen weights, too.
    With scaling, the loss is scaled and an update that overflows is skipped. With clip_norm, larger gradients are
    scaled down to that norm. The norm of the summed gradients decides both: it has the same bits on all ranks, and
    stays on the device, so there is no host sync.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        device: torch.device,
        scaling: "Scaling | None" = None,
        clip_norm: float | None = None,
    ) -> None:
        """Round the weights.

        Raises: TypeError; ValueError for an odd name or clip_norm, or trained parameters not of 16 or 32 real bits.
        """
        if name not in COMPUTE_DTYPES:
            raise ValueError(f"name={name!r} is unknown; choose one of {', '.join(COMPUTE_DTYPES)}")
        if scaling is not None and not hasattr(scaling, "make"):
            raise TypeError(f"scaling={scaling!r} is no Scaling, such as Scaling(initial=65536.0, growth_steps=2000)")
        if clip_norm is not None and not (isinstance(clip_norm, int | float) and clip_norm > 0):
            raise ValueError(f"clip_norm={clip_norm!r} must be a positive number; None does not clip")
        require_trainable(model)
        self.compute_dtype, self._device = COMPUTE_DTYPES[name], device
        is_autocast = name in AUTOCAST_DTYPES
        self.forward: Callable[[], Any] = partial(in_forward, name, device=device) if is_autocast else nullcontext
        """Context of every forward of the model; backward runs outside of it."""
        # before the rounding to half precision, so that masters keep all digits of the initial weights
        whole = {key: p.detach().float().clone() for key, p in model.named_parameters() if p.dtype in TRAINED_DTYPES}
        if any(p.dtype != self.compute_dtype for p in model.parameters()):
            to_half_(model, self.compute_dtype)
        self._model = model
        masters = {
            key: p if p.dtype == torch.float32 else nn.Parameter(whole[key])
            for key, p in model.named_parameters()
            if p.requires_grad
        }
        self._frozen = {
            key: whole[key].cpu()
            for key, p in model.named_parameters()
            if key not in masters and key in whole and p.dtype != torch.float32
        }
        """fp32 values of rounded frozen weights, for checkpoints only."""
        self.weights: MasterWeights = WholeWeights(model, masters)
        self._clip_norm = clip_norm
        self._scale = None if scaling is None else scaling.make(device)
        self._has_scaled = False
        self._known = WeakSet[torch.optim.Optimizer]()  # optimizers of masters
        self._never = torch.zeros((), dtype=torch.bool, device=device)
        self._norm = None if scaling is None and clip_norm is None else torch.zeros((), device=device)
        """Norm of the last step's gradients if scaling or clipping needs it; else a report computes it."""

    @property
    def masters(self) -> Mapping[str, Tensor]:
        """Return the tensors that the optimizer updates, by parameter name, without frozen ones."""
        return self.weights.masters

    def scaled(self, loss: Tensor) -> Tensor:
        self._has_scaled = True
        if isinstance(self.weights, WholeWeights) and self.weights.are_apart:  # scripts cannot make sharded ones
            self.weights.start_backward_()
        return loss if self._scale is None else self._scale.scaled(loss)

    def backward(self, loss: Tensor) -> None:
        self.scaled(loss).backward()

    @torch.no_grad()
    def update_(self, optimizer: torch.optim.Optimizer, *, skip_1: Tensor | None = None) -> None:
        """Unscale and clip the summed gradients in fp32, update the masters, write the half-precision weights.

        If skip_1 (bool) is true, weights, optimizer and loss scale stay as they are. No host sync if the optimizer is
        fused. The model's next forward may follow at once; other code that reads weights calls wait_for_weights first.
        Raises: ValueError for an optimizer of half weights, an unscaled loss, or weights that other code has changed.
        """
        if self._scale is not None and not self._has_scaled:
            raise ValueError("the loss was not scaled: call precision.backward(loss) instead of loss.backward()")
        if self.weights.are_apart:
            if optimizer not in self._known:
                load("bigbatch.trainer.step.divergence.require_masters")(optimizer, self._model, self.masters)
                self._known.add(optimizer)
            # all-gathers of the last weights, which no forward has awaited, may still read memory that is written now
            self.weights.wait_for_weights()
            self.weights.fetch_grads_()
        skip = self._never if skip_1 is None else skip_1.view(())
        divisor = None
        if self._norm is not None:
            divisor, skip = self._unscale_and_clip(self._norm, skip)
        step_or_skip_(optimizer, self.weights.masters.values(), divisor=divisor, skip=skip)
        if self.weights.are_apart:
            self.weights.publish_()

    def _unscale_and_clip(self, last_norm: Tensor, skip: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return the divisor of the gradients, and whether to skip the update; write their norm into last_norm."""
        divisor, norm = None, self._total_norm()
        if self._scale is not None:
            divisor = self._scale.divisor
            skip = self._scale.judge_(norm, failed=skip)
        # clipping is by the norm of the gradients themselves, not of those times the loss scale
        last_norm.copy_(norm if divisor is None else norm / divisor)
        if self._clip_norm is not None:
            shortening = ((last_norm + CLIP_EPS) / self._clip_norm).clamp(min=1.0)
            divisor = shortening if divisor is None else divisor * shortening
        return divisor, skip

    def wait_for_weights(self) -> None:
        """Wait until the model has all weights that update_ wrote."""
        self.weights.wait_for_weights()

    @property
    def skips_overflow(self) -> bool:
        """Return whether an update with non-finite gradients is skipped, and the loss scale lowered."""
        return self._scale is not None

    def _total_norm(self) -> Tensor:
        """Compute the L2 norm of the gradients of all masters. Collective if they are sharded."""
        return torch.linalg.vector_norm(self.weights.norms(grads_of(self.masters.values())))

    def grad_norm(self) -> Tensor:
        """Return the L2 norm () of the last step's gradients, before clipping. Collective if they are sharded."""
        return self._total_norm() if self._norm is None else self._norm

    def write_half_(self) -> None:
        """Round the masters into the model's half-precision weights."""
        self.weights.publish_()
        self.wait_for_weights()

    @torch.no_grad()
    def figures(self) -> dict[str, float | None]:
        """Return the figures of the last step for a report, equal on all ranks. Collective; waits for the device.

        grad_norm: L2, before clipping; None if it overflowed. underflow_fraction: of the summed half-precision
        gradients, the elements that are 0 or have lost digits; None if weights and gradients are fp32.
        """
        norm = float(self.grad_norm())
        half, underflow = self.weights.half_grads(), "bigbatch.trainer.step.loss_scale.underflow_fraction"
        return {
            **({"loss_scale": 1.0, "overflow_steps": 0} if self._scale is None else self._scale.figures()),
            "underflow_fraction": load(underflow)(half, sum_parts=self.weights.sum_parts) if half else None,
            "grad_norm": norm if math.isfinite(norm) else None,
        }

    def require_progress(self, done: int, *, is_last: bool) -> None:
        """Raise TrainingDiverged if no loss scale avoids overflow. is_last: the run ends. Waits for the device."""
        if self._scale is not None:
            self._scale.require_progress(done, is_last=is_last)

    def all_finite(self, state: Iterable[Mapping[str, Any]]) -> bool:
        """Return whether masters, or the optimizer's state, are finite. Waits for the device. Collective if sharded."""
        tensors = [leaf for leaf in torch.utils._pytree.tree_leaves([*map(dict, state)]) if isinstance(leaf, Tensor)]
        is_odd = not all(bool(tensor.isfinite().all()) for tensor in tensors)
        odd_1 = torch.full((1,), float(is_odd), dtype=torch.float64, device=self._device)
        return not self.weights.sum_parts(odd_1).any()

    def model_state(self) -> dict[str, Tensor]:
        """Return the model's state_dict with fp32 masters in place of half-precision weights, under all their names."""
        state = {**self._model.state_dict(), **self._frozen, **self.weights.whole()}
        first = {parameter: key for key, parameter in self._model.named_parameters()}
        shared = {key: first[p] for key, p in self._model.named_parameters(remove_duplicate=False) if first[p] != key}
        return state | {key: state[name] for key, name in shared.items()}

    def load_model_state(self, state: Mapping[str, Tensor]) -> None:
        """Load what model_state gave. Raises: RuntimeError listing missing and foreign keys."""
        self._model.load_state_dict(state)
        for key, kept in self._frozen.items():
            kept.copy_(state[key])
        self.weights.load_(state)

    def state_dict(self) -> dict[str, Any]:
        return {} if self._scale is None else self._scale.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of the loss scale; ignored if this run has none. Raises: ValueError."""
        if self._scale is not None:
            self._scale.load_state_dict(state)


def step_or_skip_(
    optimizer: torch.optim.Optimizer, weights: Iterable[Tensor], *, divisor: Tensor | None, skip: Tensor
) -> None:
    """Make one step with the gradients divided by divisor (None: as they are), or none if skip (bool) is true.

    Fused optimizers, including bigbatch's, divide and skip in their kernels. For other optimizers the host waits.
    """
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        optimizer.found_inf = skip.float()  # type: ignore[attr-defined]
        optimizer.step()
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        return
    if divisor is not None:
        torch._foreach_div_(grads_of(weights), divisor)
    if not skip.item():
        optimizer.step()


def require_trainable(model: nn.Module) -> None:
    """Raise ValueError for a trained parameter that is complex, float64 or of 8 bits: none of its digits are lost."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in TRAINED_DTYPES:
            remedy = "give the model float32 weights, such as by .float() in its constructor"
            if parameter.is_complex():
                remedy = "train torch.view_as_real of it, and call torch.view_as_complex in forward"
            dtype = str(parameter.dtype).removeprefix("torch.")
            raise ValueError(f"{name} is {dtype}, and weights are trained as float32 numbers: {remedy}")


def to_half_(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast all weights but those of norm layers, which stay fp32."""
    for parameter in half_precision_parameters(model).values():
        parameter.data = parameter.data.to(dtype)


def half_precision_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return, by name, the parameters that half precision rounds: those of TRAINED_DTYPES, except in norm layers."""
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, module in model.named_modules()
        if not isinstance(module, _NormBase)
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.dtype in TRAINED_DTYPES
    }


def in_forward(name: str, *, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context of a model's forward in that precision: autocast, or none."""
    if name not in AUTOCAST_DTYPES:
        return nullcontext()
    # each weight is used once in a forward, so a cache of rounded ones would only keep memory
    return torch.autocast(device.type, dtype=AUTOCAST_DTYPES[name], cache_enabled=False)
