"""Find the source lines of a step that make the host wait for the device."""

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).resolve().parents[2]
"""Folder to which source paths are relative."""
TORCH = str(Path(torch.__file__).parent)

WAITING = {
    torch.ops.aten._local_scalar_dense.default: "reads a number, as .item(), float() and if do",
    torch.ops.aten.nonzero.default: "counts elements, as nonzero() and where() of one argument do",
    torch.ops.aten.masked_select.default: "counts elements, as masked_select() does",
    torch.ops.aten._unique2.default: "counts elements, as unique() does",
    torch.ops.aten.repeat_interleave.Tensor: "adds up sizes, as repeat_interleave() does",
}
"""Operators that return a value to the host."""
INDEXED = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)


class FindSyncs(TorchDispatchMode):
    """Notes each operator that waits for a GPU, while it is active; backward is seen, other threads are not.

    On a CPU nothing waits, and all tensors count: what is found would wait where they were on a GPU. Copies between the
    two are found on a GPU alone; calls of synchronize(), and what compiled functions and captured graphs do, are not.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._is_gpu = device.type == "cuda"
        self.found: Counter[str] = Counter()
        """Place and reason -> count."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if reason := self._reason(func, args, kwargs):
            self.found[f"{place()}: {reason}"] += 1
        return func(*args, **kwargs)

    def _reason(self, func: Any, args: Any, kwargs: Any) -> str | None:
        if func in WAITING or func in INDEXED:
            if self._is_gpu and not args[0].is_cuda:
                return None
            if func in WAITING:
                return WAITING[func]
            # how many elements a mask picks decides the result's shape, which the host must know
            is_mask = any(index is not None and index.dtype == torch.bool for index in args[1])
            return "counts elements, as indexing with a mask does" if is_mask else None
        if func is torch.ops.aten._to_copy.default:
            source, target = args[0].device, kwargs.get("device") or args[0].device
            is_blocking = not kwargs.get("non_blocking")
        elif func is torch.ops.aten.copy_.default:
            source, target = args[1].device, args[0].device
            is_blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            return None
        if not is_blocking or source.type == target.type:
            return None
        if target.type == "cpu":
            return "copies to the host, as .cpu() does"
        return "copies from the host, as x[0] = 1.0 and .to() without non_blocking do"


def place() -> str:
    """Find the innermost line outside of torch and of this file, such as 'trainer/step/loop.py:123 (run)'."""
    foreign = (__file__, TORCH, "<")
    frames = [each for each in traceback.extract_stack() if not each.filename.startswith(foreign)]
    if not frames:
        return "torch itself"
    last, path = frames[-1], Path(frames[-1].filename).resolve()
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    return f"{name}:{last.lineno} ({last.name})"
