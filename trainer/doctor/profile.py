"""Profile a step: seconds of its phases and operators, and the host's waits for the device."""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.timeline import Timeline
from bigbatch.trainer.doctor.syncs import FindSyncs
from bigbatch.trainer.doctor.verdict import WAIT_FOR_IMAGES, WAIT_FOR_SUMS

SPANS = {
    # as the training loop names them: as they are shown
    "input wait": WAIT_FOR_IMAGES,
    "forward": "forward",
    "backward": "backward",
    "wait for the sums": WAIT_FOR_SUMS,
    "update": "update",
}
PREPARE, REST = "copy, augment, normalize", "loss, counting, the rest"
REPLAYED = "all the rest: a captured step tells no parts"
NUM_OPERATORS = 6


def profile_step(
    timed: Callable[[int], float], communicator: Communicator, *, num_steps: int, is_captured: bool
) -> dict[str, Any]:
    """Return the profile of a step on this rank. timed: runs that many steps, returns their seconds. Collective."""
    timeline = communicator.timeline
    timeline.is_active = True
    seconds = timed(num_steps) / num_steps
    timeline.is_active = False
    phases = _phases(timeline, num_steps=num_steps)
    phases[REPLAYED if is_captured else REST] = max(0.0, seconds - sum(phases.values()))
    is_gpu = communicator.device.type == "cuda"
    # a dispatch mode does not see into compiled code
    with FindSyncs(communicator.device) as syncs, torch.compiler.set_stance("force_eager"):
        timed(1)
    # apart from the phases above: it would lengthen their seconds
    with profile(activities=activities_on(communicator.device)) as profiled:
        profiled_seconds = timed(num_steps)
    operators = [
        (each.key, 1e-6 * (each.self_device_time_total if is_gpu else each.self_cpu_time_total) / num_steps)
        for each in profiled.key_averages()
        if each.device_type.name == "CPU"  # kernels count for the operators that launched them
        and not each.is_user_annotation  # which last as long as all in them, and the gaps between
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
    """Return what the profiler is to record of work on this device."""
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
