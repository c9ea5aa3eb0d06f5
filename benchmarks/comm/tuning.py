"""What `bigbatch comm tune` would choose for a job and a model, measured in less time. For "ours tuned"."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.comm.job import Job
from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable, Times
from bigbatch.comm.connection import make_wire
from bigbatch.comm.gradients.fusion import DEFAULT_SIZES
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.comm.tuning.measure import MeasuredLinks
from bigbatch.comm.tuning.ready_times import in_ready_order, measure_backward
from bigbatch.comm.tuning.sweep import measure_times, tune_sizes
from bigbatch.comm.tuning.tuner import TuningFindings, choose

DEFAULT_ALGORITHM = "hierarchical"
"""That of the packaged experiments."""
TUNED_WIRES = {"ours tuned": None, "ours fp16": "float16"}
"""Contestants that are tuned, each with its own wire, as a user would."""


def tune_each(
    job: Job,
    contestants: Iterable[str],
    named_parameters: Mapping[str, nn.Parameter],
    forward: Callable[[], Tensor],
    *,
    seconds: float,
) -> dict[str, TuningFindings]:
    """Measure backward, and for each contestant that is to be tuned every algorithm by size; choose. Collective."""
    tuned = [name for name in contestants if name in TUNED_WIRES]
    if not tuned:
        return {}
    backward = measure_backward(named_parameters, forward, job.communicator, seconds=seconds / 5)
    for parameter in named_parameters.values():
        parameter.grad = None
    tensors = in_ready_order(named_parameters, backward)
    sizes = tune_sizes(sum(tensor.num_bytes for tensor in tensors))
    found = {}
    for name in tuned:
        communicator = job.communicator.with_algorithm(DEFAULT_ALGORITHM, wire=make_wire(TUNED_WIRES[name]))
        times = measure_times(communicator, sizes, dtype=torch.float32, seconds=seconds, on_size=lambda *_: None)
        found[name] = choose(
            MeasuredLinks(None, None),
            times,
            backward,
            tensors,
            stated=DEFAULT_SIZES,
            stated_table=HybridTable((HybridRow(None, DEFAULT_ALGORITHM),)),
        )
    return found


def make_reducer(
    job: Job, named_parameters: Mapping[str, nn.Parameter], *, tuned: TuningFindings | None, wire: str | None
) -> GradientReducer:
    """Make a reducer with the tuned table and plan, or with the defaults. Collective."""
    if tuned is None:
        communicator, sizes = job.communicator.with_algorithm(DEFAULT_ALGORITHM, wire=make_wire(wire)), DEFAULT_SIZES
    else:
        communicator = job.communicator.with_algorithm("hybrid", table=tuned.table, wire=make_wire(wire))
        sizes = tuned.chosen.sizes
    return GradientReducer(named_parameters.items(), communicator, **dataclasses.asdict(sizes))


def describe_times(times: Times) -> dict[str, Any]:
    """Describe what a table rests on: size in bytes -> algorithm -> repetitions and median seconds."""
    return {
        str(size): {name: {"n": len(each.seconds), "median": each.median} for name, each in times[size].items()}
        for size in sorted(times)
    }


def describe_tuned(tuned: Mapping[str, TuningFindings]) -> dict[str, Any]:
    """Describe each contestant that was tuned, for the record."""
    return {name: _describe(findings) for name, findings in tuned.items()}


def _describe(tuned: TuningFindings) -> dict[str, Any]:
    return {
        "table": str(tuned.table),
        "sizes": dataclasses.asdict(tuned.chosen.sizes),
        "buffers": str(tuned.chosen.plan).splitlines(),
        "times": describe_times(tuned.times),
        "measured_up_to_bytes": max(tuned.times),
        "simulated_exposed_seconds": tuned.chosen.exposed_seconds,
    }
