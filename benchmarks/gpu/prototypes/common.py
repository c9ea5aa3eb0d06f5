"""Compare a prototype with today's kernels: values with fp64, launches, bytes, and on a GPU milliseconds."""

import argparse
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from benchmarks.record import spread

Values: TypeAlias = Mapping[str, Tensor]
Choice = TypeVar("Choice")
H200 = ("cuda", 90, 32)
ROUNDS = 20
FLUSH_BYTES = 2**29
"""Written before each timed call: many times an L2 cache."""
EXACT_ENOUGH = {"cuda": 1.0, "cpu": 2.0}
"""Roundings of bf16 up to which no error is compared with today's: Triton's interpreter truncates to bf16."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One piece of a step by today's kernels and by new ones. The callables read the same tensors at each call."""

    name: str
    """What is computed, and its shape."""
    today: Callable[[], Values]
    new: Callable[[], Values]
    exact: Callable[[], Values] | None = None
    """The same values in fp64; None if only bits are compared."""
    elements: int
    """Number of elements by which bytes are counted."""
    today_bytes: float
    """Bytes per element that today's kernels read and write, calculated or lowered."""
    new_bytes: float
    today_launches: int
    new_launches: int
    worst: float = 1.5
    """Factor of today's error that the new one may reach."""
    enough_fp32: float = 1.0
    """Roundings of values in fp32 up to which no error is compared with today's."""
    item: int | None = None
    """Number of the change, if it is not the prototype's."""
    note: str = ""
    """Such as the size of a tile."""
    is_timed: bool = True
    has_same_bits: bool = False
    """Whether the new kernels must compute today's bits."""
    restore: Callable[[], object] = lambda: None
    """Undoes what the callables write in place; called before each of them when values are compared."""

    def values(self, action: Callable[[], Values]) -> Values:
        """Return copies of what a callable computes."""
        self.restore()
        return {name: tensor.clone() for name, tensor in action().items()}


@dataclass(frozen=True, kw_only=True)
class Prototype:
    """A change of a step's kernels."""

    name: str
    item: int
    """Number of the change in the list of calculated gains: benchmarks/results/prototypes-cpu.md."""
    change: str
    expected_ms: tuple[float, float]
    """Calculated gain of a step of 256 images, which takes 38.0 ms on an H200."""
    comparisons: Callable[[torch.device, bool], Iterable[Comparison]]
    """Makes them for a device, small or of ResNet-50's size; one after the other, for the memory of one."""
    kernels: "Sequence[Kernel]" = ()


@dataclass(frozen=True)
class Kernel:
    """A Triton kernel as it is compiled without tensors.

    Arguments are constants, or types such as *bf16 and i32; with :16 if it is a multiple of 16, which Triton finds out
    at a launch, and without which it loads single elements.
    """

    function: Any
    arguments: Mapping[str, Any]
    options: dict[str, Any] = field(default_factory=dict)
    """Such as num_warps."""


def main(prototype: Prototype) -> None:
    """Print a line of JSON of the prototype, and one of each comparison or kernel as soon as it is done.

    Ends the process with a text if a value is wrong.
    """
    parser = argparse.ArgumentParser(description=prototype.change)
    parser.add_argument("--small", action="store_true", help="small shapes, also without a GPU")
    parser.add_argument("--cubins", action="store_true", help="only compile the kernels for an H200")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not (options.small or options.cubins):
        sys.exit(f"{prototype.name}: there is no GPU; --small compares values on a CPU")
    print_json({name: getattr(prototype, name) for name in ("name", "item", "change", "expected_ms")})
    if options.cubins:
        for kernel in prototype.kernels:
            print_json(compiled_for_h200(kernel))
        return
    if device.type == "cpu":
        torch.set_num_threads(1)  # tensors are small, and more threads only wait for each other
    torch.backends.cudnn.benchmark = True  # as in a run
    wrong = []
    for comparison in prototype.comparisons(device, options.small):
        row = compare(comparison, device)
        print_json({"item": comparison.item or prototype.item} | row)
        wrong += [f"{row['name']}: {', '.join(row['wrong'])}"] if row["wrong"] else []
    if wrong:
        sys.exit(f"wrong values: {'; '.join(wrong)}")


def print_json(line: Mapping[str, Any]) -> None:
    """Print a line that a reader has even if the process is killed later."""
    print(json.dumps(line, default=str), flush=True)


def compare(comparison: Comparison, device: torch.device) -> dict[str, Any]:
    """Compute errors, and on a GPU times. Errors are in roundings: see roundings.

    Values come from cuDNN's deterministic algorithms, of which each call has the same bits. Times are those of the
    algorithms of a run.
    """
    with torch.backends.cudnn.flags(enabled=True, benchmark=True, deterministic=True, allow_tf32=False):
        today, new, again = map(comparison.values, (comparison.today, comparison.new, comparison.new))
        exact = comparison.values(comparison.exact) if comparison.exact else {}
    assert set(new) <= set(today)
    assert set(exact) in (set(new), set())
    errors = {name: [roundings(each[name], exact[name]) for each in (today, new)] for name in exact}
    half_enough = EXACT_ENOUGH[device.type]
    enough = {name: half_enough if value.element_size() < 4 else comparison.enough_fp32 for name, value in new.items()}
    wrong = [name for name, (old, own) in errors.items() if not own <= max(comparison.worst * old, enough[name])]
    wrong += [f"{name} differs when repeated" for name in new if not torch.equal(new[name], again[name])]
    if comparison.has_same_bits:
        wrong += [f"{name} has other bits than today" for name in new if not torch.equal(new[name], today[name])]
    row = {
        "name": comparison.name,
        "launches": [comparison.today_launches, comparison.new_launches],
        "bytes_per_element": [comparison.today_bytes, comparison.new_bytes],
        "dtypes": {name: str(value.dtype).removeprefix("torch.") for name, value in new.items()},
        "roundings": errors,
        "equal": {name: (value == today[name]).double().mean().item() for name, value in new.items()},
        "wrong": wrong,
        "note": comparison.note,
    }
    return row | timed(comparison) if device.type == "cuda" and comparison.is_timed else row


def roundings(value: Tensor, exact: Tensor) -> float:
    """Return the largest error: in half distances of the value's dtype, at the exact value or the rms of all if larger.

    A value that was computed exactly and rounded has at most 1.
    """
    assert exact.dtype == torch.float64
    scale = exact.abs().clamp(min=exact.square().mean().sqrt().item())
    error = ((value.double() - exact).abs() / scale).max().item()
    return 2 * error / torch.finfo(value.dtype).eps if math.isfinite(error) else math.inf


def timed(comparison: Comparison) -> dict[str, Any]:
    """Measure today's kernels, the new ones, and a copy, in turns; each in a CUDA graph, with a cold L2 cache."""
    source = torch.zeros(2**30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    actions = {"today": comparison.today, "new": comparison.new, "copy": lambda: target.copy_(source)}
    seconds = seconds_in_turns(actions)
    copy_rate = 2 * source.numel() / spread(seconds["copy"])["median"]
    num_bytes = {"today": comparison.today_bytes, "new": comparison.new_bytes}
    bounds = {name: each * comparison.elements / copy_rate for name, each in num_bytes.items()}
    return {
        "seconds": {name: spread(seconds[name]) for name in bounds},
        "ratio": spread([new / old for old, new in zip(seconds["today"], seconds["new"], strict=True)]),
        "share_of_bound": {name: bound / spread(seconds[name])["median"] for name, bound in bounds.items()},
        "copy_gb_per_s": copy_rate / 1e9,
    }


def seconds_in_turns(actions: Mapping[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Replay each action's graph ROUNDS times in turn, after a discarded round."""
    graphs = {name: captured(action) for name, action in actions.items()}
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in actions}
    for _ in range(ROUNDS + 1):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()  # takes longer than the launch of the graph, which so is not timed
            start.record()
            graph.replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: [start.elapsed_time(end) / 1e3 for start, end in pairs[1:]] for name, pairs in events.items()}


def fastest(choices: Sequence[Choice], action: Callable[[Choice], object], device: torch.device) -> Choice:
    """Return the choice with which a GPU is fastest, and elsewhere the first one."""
    if device.type == "cpu":
        return choices[0]
    seconds = seconds_in_turns({str(each): partial(action, each) for each in choices})
    return min(choices, key=lambda each: median(seconds[str(each)]))


def captured(action: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Capture a call, after calls that compile and allocate."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            action()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        action()
    return graph


def compiled_as_today(function: Callable[..., Any], device: torch.device, **settings: Any) -> Callable[..., Any]:
    """Return what the product runs: the function compiled as a region on a GPU, and itself on a CPU.

    settings: of torch's compiler, beside those of the product. Raises: RuntimeError for one that torch does not know.
    """
    from bigbatch.trainer.models.regions import GPU_OPTIONS, compile_region

    made = compile_region(function, options={**GPU_OPTIONS, **settings})
    return made if device.type == "cuda" else function


def compiled_for_h200(kernel: Kernel) -> dict[str, Any]:
    """Compile to machine code of an H200; return its constants, shared bytes, registers of a thread, spilled bytes.

    The process must have imported Triton without its interpreter.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments, names = kernel.arguments, kernel.function.arg_names
    assert set(arguments) == set(names), set(arguments) ^ set(names)
    is_type = {name: isinstance(arguments[name], str) for name in names}
    types = {name: arguments[name].partition(":")[0] if is_type[name] else "constexpr" for name in names}
    multiples = [place for place, name in enumerate(names) if is_type[name] and arguments[name].endswith(":16")]
    constants = {(place,): arguments[name] for place, name in enumerate(names) if not is_type[name]}
    source = ASTSource(
        fn=kernel.function,
        signature=types,
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in multiples},
    )
    code = triton.compile(source, target=GPUTarget(*H200), options=kernel.options)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(code.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    used = {name: int(count) for name, count in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    sizes = {name: arguments[name] for name in names if not is_type[name]} | kernel.options
    memory = {"shared_bytes": code.metadata.shared, "spilled_bytes": used["STACK"] + used["LOCAL"]}
    return {"kernel": kernel.function.__name__, **sizes, "registers": used["REG"], **memory}
