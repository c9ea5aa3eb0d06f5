"""The end of a LARS step on a GPU: decay, scale, momentum and weights of many tensors in one pass by one kernel."""

from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils._triton import has_triton_package

BLOCK = 4096
"""Elements that one program of the kernel updates."""
MOST_TABLES = 8
"""Tables that are kept, for scripts in which gradients lie elsewhere at each step."""

Table: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""int64: addresses of weights, gradients and momenta; sizes; tensor and first element of each program."""


class ScaledStep:
    """Writes v = momentum * v + scale * (g / divisor + weight_decay * w) and w -= lr * v, with a scale for each tensor.

    That reads and writes 20 bytes per weight, torch's kernels for lists of tensors 44. A table on the device tells
    where the tensors lie; it is made again when that has changed.
    """

    def __init__(self) -> None:
        self._tables: dict[tuple[int, ...], Table] = {}
        self._captured: list[Table] = []
        """Tables that CUDA graphs read as long as they live."""

    def __call__(
        self,
        weights: list[Tensor],
        grads: list[Tensor],
        momenta: list[Tensor],
        *,
        scales_N: Tensor,
        divisor: Tensor | None,
        lr: float | Tensor,
        overflow: Tensor | None,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
    ) -> bool:
        """Update N fp32 tensors laid out alike, or none if overflow is 1; return False if it cannot.

        divisor, lr, overflow: () fp32 on the device. momenta: empty without momentum. It cannot while a CUDA graph is
        captured if no step of these tensors came before: a table is a copy from the host.
        """
        from bigbatch.trainer.optim.scaled_step_kernel import update_kernel

        table = self._find_table(weights, grads, momenta)
        if table is None:
            return False
        addresses_RN, sizes_N, programs_2P = table
        with torch.cuda.device_of(weights[0]):  # Triton launches on the current device
            update_kernel[(programs_2P.shape[1],)](
                addresses_RN,
                sizes_N,
                programs_2P,
                scales_N,
                scales_N if divisor is None else divisor,  # anything, where it is not read
                lr,
                scales_N if overflow is None else overflow,
                momentum,
                weight_decay,
                len(weights),
                programs_2P.shape[1],
                HAS_DIVISOR=divisor is not None,
                HAS_OVERFLOW=overflow is not None,
                IS_LR_ON_DEVICE=isinstance(lr, Tensor),
                HAS_MOMENTUM=bool(momenta),
                NESTEROV=nesterov,
                BLOCK=BLOCK,
            )
        return True

    def _find_table(self, *columns: list[Tensor]) -> Table | None:
        weights = columns[0]
        key = (*(tensor.data_ptr() for column in columns for tensor in column), *(w.numel() for w in weights))
        is_captured = weights[0].is_cuda and torch.cuda.is_current_stream_capturing()
        if key not in self._tables:
            if is_captured:
                return None
            if len(self._tables) == MOST_TABLES:
                self._tables.pop(next(iter(self._tables)))
            self._tables[key] = _make_table(columns)
        if is_captured:
            self._captured.append(self._tables[key])
        return self._tables[key]


def can_step(weight: Tensor) -> bool:
    """Return whether the kernel can update tensors of this one's device and dtype."""
    return weight.is_cuda and weight.dtype == torch.float32 and has_triton_package()


def _make_table(columns: tuple[list[Tensor], ...]) -> Table:
    weights, device = columns[0], columns[0][0].device
    sizes = [weight.numel() for weight in weights]
    programs = [(index, first) for index, size in enumerate(sizes) for first in range(0, size, BLOCK)]
    addresses = [[tensor.data_ptr() for tensor in column] for column in columns if column]
    parts = (addresses, sizes, list(zip(*programs, strict=True)))
    # pinned, so that the host does not wait for the copy
    addresses_RN, sizes_N, programs_2P = (
        torch.tensor(part, dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        for part in parts
    )
    return addresses_RN, sizes_N, programs_2P
