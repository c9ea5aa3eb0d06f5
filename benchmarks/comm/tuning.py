"""Choices of `bigbatch comm tune` for a job and a model, measured in less time. For "ours tuned"."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from benchmarks.comm.job import Job
from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable, Times
from bigbatch.comm.connect import make_wire
from bigbatch.comm.gradients.fusion import DEFAULT_SIZES
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.tools.measure.tune import TuneResults, tune
from bigbatch.tools.measure.whole_steps import StepCandidate

DEFAULT_ALGORITHM = "hierarchical"
"""Algorithm of the packaged experiments."""
TUNED_WIRES = {"ours tuned": None, "ours fp16": "float16"}
"""Contestants that are tuned, each with its own wire, as a user would."""


def tune_each(
    job: Job,
    contestants: Iterable[str],
    named_parameters: Mapping[str, nn.Parameter],
    forward: Callable[[], Tensor],
    *,
    seconds: float,
) -> dict[str, TuneResults]:
    """Tune for each contestant that needs it, with its own wire. Collective."""
    stated, found = StepCandidate(HybridTable((HybridRow(None, DEFAULT_ALGORITHM),)), DEFAULT_SIZES), {}
    for name, wire in TUNED_WIRES.items():
        if name in contestants:
            communicator = job.communicator.with_algorithm(DEFAULT_ALGORITHM, wire=make_wire(wire))
            found[name] = tune(communicator, named_parameters, forward, stated=stated, seconds=seconds)
            for parameter in named_parameters.values():
                parameter.grad = None
    return found


def make_reducer(
    job: Job, named_parameters: Mapping[str, nn.Parameter], *, tuned: TuneResults | None, wire: str | None
) -> GradientReducer:
    """Make a reducer with the tuned table and plan, or with the defaults. Collective."""
    if tuned is None:
        communicator, sizes = job.communicator.with_algorithm(DEFAULT_ALGORITHM, wire=make_wire(wire)), DEFAULT_SIZES
    else:
        communicator = job.communicator.with_algorithm("hybrid", table=tuned.chosen.table, wire=make_wire(wire))
        sizes = tuned.chosen.sizes
    return GradientReducer(named_parameters.items(), communicator, **dataclasses.asdict(sizes))


def describe_times(times: Times) -> dict[str, Any]:
    """Describe the measurements behind a table: size in bytes -> algorithm -> repetitions and median seconds."""
    return {
        str(size): {name: {"n": len(each.seconds), "median": each.median} for name, each in times[size].items()}
        for size in sorted(times)
    }


def describe_tuned(tuned: Mapping[str, TuneResults]) -> dict[str, Any]:
    """Describe each contestant that was tuned, for the record."""
    return {
        name: {
            "table": str(each.chosen.table),
            "sizes": dataclasses.asdict(each.chosen.sizes),
            "buffers": str(each.chosen.sizes.plan(each.tensors)).splitlines(),
            "times": describe_times(each.times),
            "measured_up_to_bytes": max(each.times, default=0),
        }
        for name, each in tuned.items()
    }
