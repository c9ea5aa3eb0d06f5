"""Profile a step: seconds of its phases and operators, and the source lines that make the host wait for the device."""

import json
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.timeline import Timeline, recording
from bigbatch.tools.doctor.limit import WAIT_FOR_IMAGES, WAIT_FOR_SUMS

SPANS = {
    # name in the training loop: name in the report
    "input wait": WAIT_FOR_IMAGES,
    "forward": "forward",
    "backward": "backward",
    "wait for the sums": WAIT_FOR_SUMS,
    "update": "update",
}
PREPARE, REST = "copy, augment, normalize", "loss, counting, the rest"
REPLAYED = "all the rest: a captured step hides its parts"
NUM_OPERATORS = 6

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


def profile_step(
    timed: Callable[[int], float], communicator: Communicator, *, num_steps: int, is_captured: bool
) -> dict[str, Any]:
    """Return the profile of a step on this rank. timed: runs that many steps, returns their seconds. Collective."""
    with recording(communicator.transport) as timeline:
        seconds = timed(num_steps) / num_steps
    phases = _phases(timeline, num_steps=num_steps)
    phases[REPLAYED if is_captured else REST] = max(0.0, seconds - sum(phases.values()))
    is_gpu = communicator.device.type == "cuda"
    # a dispatch mode does not see into compiled code
    with FindSyncs(communicator.device) as syncs, torch.compiler.set_stance("force_eager"):
        timed(1)
    # in separate steps: the profiler would lengthen the phases above
    with profile(activities=activities_on(communicator.device)) as profiled:
        profiled_seconds = timed(num_steps)
    operators = [
        (each.key, 1e-6 * (each.self_device_time_total if is_gpu else each.self_cpu_time_total) / num_steps)
        for each in profiled.key_averages()
        if each.device_type.name == "CPU"  # kernels count for the operators that launched them
        and not each.is_user_annotation  # an annotation lasts as long as all operators in it, and the gaps
    ]
    kernels = (
        each.time_range
        for each in profiled.events() or ()
        if each.device_type.name == "CUDA" and not each.is_user_annotation
    )
    busy_us = covered((each.start, each.end) for each in kernels)
    return {
        "seconds": seconds,
        "phases": phases,
        "operators": sorted(operators, key=lambda each: -each[1])[:NUM_OPERATORS],
        "busy_share": 1e-6 * busy_us / profiled_seconds if is_gpu else None,
        "syncs": dict(syncs.found),
    }


def activities_on(device: torch.device) -> list[ProfilerActivity]:
    """Return the activities that the profiler must record for work on this device."""
    return [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]


def _phases(timeline: Timeline, *, num_steps: int) -> dict[str, float]:
    """Return seconds per step by displayed name; the time between a batch and its forward is its preparation."""
    taken = defaultdict[str, float](float)
    events = [json.loads(line) for line in timeline.take(rank=0, host="").splitlines()]
    steps = sorted(
        (each for each in events if each["name"] in SPANS and each["ph"] == "X"), key=lambda each: each["ts"]
    )
    arrived_us = None
    for event in steps:
        taken[SPANS[event["name"]]] += 1e-6 * event["dur"] / num_steps
        if event["name"] == "forward" and arrived_us is not None:
            taken[PREPARE] += 1e-6 * (event["ts"] - arrived_us) / num_steps
        arrived_us = event["ts"] + event["dur"] if event["name"] == "input wait" else None
    order = (WAIT_FOR_IMAGES, PREPARE, *SPANS.values())
    return {name: taken[name] for name in dict.fromkeys(order) if name in taken}


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the total length of the intervals, overlaps counted once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


class FindSyncs(TorchDispatchMode):
    """Counts operators that make the host wait for a GPU, while it is active, in forward and backward of this thread.

    On a CPU nothing waits: it counts the operators that would wait if their tensors were on a GPU. It finds copies
    between host and GPU on a GPU only, and never calls of synchronize(), compiled functions and captured graphs.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._is_gpu = device.type == "cuda"
        self.found: Counter[str] = Counter()
        """Place and reason -> count."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if reason := self._reason(func, args, kwargs):
            self.found[f"{find_caller()}: {reason}"] += 1
        return func(*args, **kwargs)

    def _reason(self, func: Any, args: Any, kwargs: Any) -> str | None:
        if func in WAITING or func in INDEXED:
            if self._is_gpu and not args[0].is_cuda:
                return None
            if func in WAITING:
                return WAITING[func]
            # the host must know the shape of the result: the number of elements that the mask selects
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


def find_caller() -> str:
    """Find the innermost line outside of torch and of this file, such as 'trainer/step/loop.py:123 (run)'."""
    foreign = (__file__, TORCH, "<")
    frames = [each for each in traceback.extract_stack() if not each.filename.startswith(foreign)]
    if not frames:
        return "torch itself"
    last, path = frames[-1], Path(frames[-1].filename).resolve()
    name = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    return f"{name}:{last.lineno} ({last.name})"
