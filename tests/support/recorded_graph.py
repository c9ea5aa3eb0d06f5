"""What stands in for a CUDA graph on a CPU: operations are recorded below autograd, and replayed without any Python.

As with a real graph, a replay works on the tensors of the capture, wherever Python has turned to since; numbers are
those of the capture; the capture itself leaves every value as it was; and a read by the host breaks it. What ranks
send each other travels in replays alone.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, Work
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten

from bigbatch.trainer.step.cuda_graph import Cut

READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")


def is_recording() -> bool:
    """Return whether the calling thread is within a capture."""
    return any(isinstance(mode, _Recording) for mode in _get_current_dispatch_mode_stack())


class RecordedCapture:
    """Takes the place of CudaCapture, and counts the calls."""

    def __init__(self) -> None:
        self.num_warm_ups = self.num_captures = self.num_replays = 0

    def warm_up(self, work: Callable[[], Tensor]) -> Tensor:
        self.num_warm_ups += 1
        return work()

    def __call__(self, work: Callable[[Cut], Tensor]) -> tuple[list[Callable[[], None]], Tensor]:
        recordings: list[_Recording] = []
        recorded = ExitStack()

        def cut() -> None:
            recorded.close()
            self.num_captures += 1
            recordings.append(recorded.enter_context(_Recording()))

        with torch.random.fork_rng(devices=[]), recorded:  # a capture draws nothing
            cut()
            result = work(cut)
        for recording in reversed(recordings):
            recording.undo_()
        return [partial(self._replay, recording) for recording in recordings], result

    def _replay(self, recording: "_Recording") -> None:
        self.num_replays += 1
        recording.replay_()


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}
        self._own: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in READS:
            raise RuntimeError("operation not permitted when stream is capturing")
        if func.namespace == "c10d":
            self._operations.append((func, args, kwargs, None))
            work = FakeWork().boxed()
            return work if len(func._schema.returns) == 1 else (args[0], work)
        tensors = _tensors((args, kwargs))
        for tensor in tensors:
            address = tensor.untyped_storage().data_ptr()
            if address not in self._own and address not in self._before:
                whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
                self._before[address] = whole, whole.clone()
        results = func(*args, **kwargs)
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        made = [t for t in _tensors(results) if t.untyped_storage().data_ptr() not in given]
        self._own.update({t.untyped_storage().data_ptr(): t for t in made})
        if made or func._schema.is_mutable:  # else it is a view
            self._operations.append((func, args, kwargs, results))
        return results

    def undo_(self) -> None:
        """Nothing happened: what was there has its values, and what the capture made has none yet."""
        with torch.no_grad():
            for whole, before in self._before.values():
                whole.copy_(before)
            for tensor in self._own.values():
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)

    @torch.no_grad()
    def replay_(self) -> None:
        """All operations again, their results where the first ones are."""
        travelling: list[Any] = []
        for func, args, kwargs, results in self._operations:
            if func._schema.name != "c10d::recv_":  # which is under way together with the message that goes out
                _arrive(travelling)
            if func.namespace == "c10d":
                travelling.append(func(*args, **kwargs))
                continue
            for old, new in zip(_tensors(results), _tensors(func(*args, **kwargs)), strict=True):
                if old is not new:
                    old.copy_(new)
        _arrive(travelling)


def _arrive(travelling: list[Any]) -> None:
    """Wait for all that ranks have started to send each other; each is a Work, or ends with one."""
    while travelling:
        started = travelling.pop(0)
        Work.unbox(started[-1] if isinstance(started, tuple) else started).wait()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, Tensor)]
