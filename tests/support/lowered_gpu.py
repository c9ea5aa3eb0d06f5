"""The code that torch's compiler writes for an H200, lowered without a GPU: launches and bytes of each kernel.

    python tests/support/lowered_gpu.py                    # regions of ResNet-50: 256 images, bf16, 4 ghost batches
    python tests/support/lowered_gpu.py ghosts=1 layer2.0  # one ghost batch in a microbatch; this region alone
    python tests/support/lowered_gpu.py layer1.1+layer1.2  # two residual blocks as one region
    python tests/support/lowered_gpu.py kernels=1          # each kernel of them
    python tests/support/lowered_gpu.py cubins=1           # kernels that were compiled to machine code of an H200, too
    python tests/support/lowered_gpu.py realize_reads_threshold=4  # with another setting of torch's compiler

Regions are traced with fake tensors on the CPU. Their graphs are moved to a GPU, lowered, and dropped where torch would
load the code. This replaces torch's internals, so it runs in a process of its own. Checked with torch 2.14.1.
"""

import ast
import gc
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.utils._triton as triton_queries
import triton
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._functorch import config as autograd_config
from torch._inductor import compile_fx, config, graph, scheduler
from torch._inductor.codecache import PyCodeCache
from torch._inductor.codegen import triton as triton_code
from torch._inductor.runtime import triton_helpers
from torch._subclasses.fake_tensor import FakeTensor
from triton.backends.compiler import GPUTarget

from bigbatch.trainer.models import build_model
from bigbatch.trainer.models.max_pool import register_operators
from bigbatch.trainer.models.norm import GhostBatchNorm2d, MicrobatchStatistics, flatten_running_statistics
from bigbatch.trainer.models.regions import GPU_OPTIONS, compile_regions_
from bigbatch.trainer.step.precision import to_half_

IMAGES = 256
INPUTS = {
    "stem": (3, 224),
    "layer1.0": (64, 56),
    "layer1.1": (256, 56),
    "layer2.0": (256, 56),
    "layer2.1": (512, 28),
    "layer3.0": (512, 28),
    "layer3.1": (1024, 14),
    "layer4.0": (1024, 14),
    "layer4.1": (2048, 7),
    "head": (2048, 7),
}
"""Region of ResNet-50 -> channels and side of its input; these ten are all that differ."""
SHORT = ("stem", "layer1.0", "layer1.1", "head")
H200 = SimpleNamespace(
    name="NVIDIA H200",
    major=9,
    minor=0,
    multi_processor_count=132,
    regs_per_multiprocessor=65536,
    warp_size=32,
    max_threads_per_multi_processor=2048,
    total_memory=150 * 10**9,
    L2_cache_size=60 * 2**20,
    gcnArchName="",
    uuid="0",
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
)
ANSWERS = {
    "is_initialized": True,
    "device_count": 1,
    "current_device": 0,
    "_exchange_device": 0,
    "_maybe_exchange_device": 0,
    "get_device_properties": H200,
    "_get_device_properties": H200,
    "get_device_capability": (9, 0),
    "get_device_name": H200.name,
    "_lazy_init": None,
    "synchronize": None,
    "set_device": None,
    "is_current_stream_capturing": False,
    "set_rng_state": None,
    "get_rng_state": torch.zeros(16, dtype=torch.uint8),
}
"""Function of torch.cuda -> its answer while code is written."""
ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "i64": 8, "i32": 4, "i8": 1, "u8": 1, "i1": 1}
IGNORED_ELEMENTS = 10**6
"""Smaller buffers are those of channels: their bytes are not counted."""


class LoweredError(Exception):
    """The code is written: what would load it is left out."""


@dataclass(frozen=True)
class Launch:
    """One launch of a Triton kernel. Bytes: each load and store in its text, times the elements of its buffer."""

    name: str
    read_bytes: int
    written_bytes: int


def _answer(value: object) -> Callable[..., Any]:
    return lambda *_args, **_kwargs: value


def play_h200() -> Callable[[bool], None]:
    """Replace what asks the driver; return the switch of torch.cuda.is_available.

    It is off while a region is traced: what traces it would call the driver.
    """
    for name, value in ANSWERS.items():
        setattr(torch.cuda, name, _answer(value))
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    for name in ("getDevice", "setDevice", "exchangeDevice", "maybeExchangeDevice", "getCurrentRawStream"):
        setattr(torch._C, f"_cuda_{name}", _answer(0))
    torch._C._conv_determine_backend_memory_format = _answer(torch.channels_last)
    for module in (triton_queries, scheduler, triton_code):
        for name in {"has_triton", "has_triton_package"} & set(vars(module)):
            setattr(module, name, _answer(True))
    driver = {"get_current_target": GPUTarget("cuda", 90, 32), "get_current_device": 0, "get_current_stream": 0}
    methods = {name: _answer(value) for name, value in {**driver, "get_device_interface": torch.cuda}.items()}
    triton.runtime.driver.set_active(type("Driver", (), methods)())
    triton_helpers.set_driver_to_gpu = _answer(None)
    # the traced code takes its branches for a GPU
    TensorVariable.method_attr_is_cuda = lambda *_: ConstantVariable.create(True)
    autograd_config.force_non_lazy_backward_lowering = True
    config.use_static_triton_launcher = False  # it keeps no machine code
    config.fx_graph_cache, config.compile_threads = False, 1  # neither reads nor makes code in other processes
    switch = SimpleNamespace(is_on=False)
    torch.cuda.is_available = lambda: switch.is_on
    return partial(setattr, switch, "is_on")


def _on_gpu(value: Any) -> Any:
    if isinstance(value, FakeTensor):
        with value.fake_mode:
            return torch.empty_strided(tuple(value.shape), value.stride(), dtype=value.dtype, device="cuda")
    return type(value)(map(_on_gpu, value)) if isinstance(value, tuple | list) else value


def lowering_backend(codes: dict[str, str], set_available: Callable[[bool], None]) -> Callable[..., Any]:
    """Return a backend of torch.compile that writes the code of a region's forward and backward into codes."""

    def take(lowered: Any) -> None:
        code = lowered.codegen()[0]
        codes["backward" if lowered.is_backward else "forward"] = getattr(code, "value", str(code))
        raise LoweredError

    def write(traced: torch.fx.GraphModule, inputs: Any, **options: Any) -> Any:
        for node in traced.graph.nodes:
            node.meta |= {"val": _on_gpu(node.meta["val"])} if "val" in node.meta else {}
            node.kwargs = {**node.kwargs, "device": torch.device("cuda")} if "device" in node.kwargs else node.kwargs
        traced.recompile()
        set_available(True)
        try:
            compile_fx.compile_fx_inner(traced, _on_gpu(list(inputs)), **options)
        except Exception as error:
            if "LoweredError" not in f"{error!r}{error.__cause__!r}{error.__context__!r}":
                raise
        finally:
            set_available(False)
        return compile_fx.make_boxed_func(lambda *_: None)

    graph.GraphLowering.compile_to_module = graph.GraphLowering._compile_to_module = take
    return partial(compile_fx.compile_fx, inner_compile=write)


def kernels_of(code: str) -> dict[str, str]:
    """Return the text of each Triton kernel in a region's code, by its name; of one with several forms, the first."""
    texts = dict(re.findall(r"(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str", code, re.S))
    several = re.findall(r"(\w+) = async_compile\.multi_kernel\('\w+', \[\s*(\w+)", code)
    return texts | {name: texts[first] for name, first in several}


def compile_kernels(code: str) -> int:
    """Compile each kernel to machine code of an H200, in its first form; return how many there are."""
    texts = kernels_of(code).values()
    kernels = [getattr(PyCodeCache.load(text), re.findall(r"^def (\w+)", text, re.M)[-1]) for text in texts]
    codes = [kernel._precompile_config(kernel.configs[0]).kernel.asm["cubin"] for kernel in kernels]
    assert all(each.startswith(b"\x7fELF") for each in codes)
    return len(codes)


def launches(code: str) -> list[Launch]:
    """List the launches of Triton kernels in a region's code, in their order."""
    kernels = kernels_of(code)
    elements: dict[str, int] = {}
    found = []
    for line in code[code.index("def call(") :].splitlines():
        elements |= _shapes(line, elements)
        if launch := re.search(r"(\w+)\.run\((.*), stream=", line):
            found.append(_launch(launch[1], kernels[launch[1]], arguments=launch[2], elements=elements))
    return found


def _shapes(line: str, elements: dict[str, int]) -> dict[str, int]:
    """Return the numbers of elements of the buffers that a line of code makes, names or checks."""
    shapes: dict[str, int] = {}
    if group := re.search(r"assert_size_stride_grouped\((\(.*?\)), (\(\(.*?\)\)), ", line):
        shapes |= zip(re.findall(r"\w+", group[1]), map(math.prod, ast.literal_eval(group[2])), strict=True)
    single = re.search(r"assert_(?:size_stride|tensor_metadata)\((\w+), (\(.*?\)),", line)
    single = single or re.search(r"(\w+) = (?:empty_strided_cuda\(|reinterpret_tensor\(\w+, )(\(.*?\)),", line)
    if single:
        shapes[single[1]] = math.prod(ast.literal_eval(single[2]))
    if renamed := re.search(r"(\w+) = (\w+); *del \2", line):
        shapes[renamed[1]] = elements.get(renamed[2], 0)
    return shapes


def _launch(name: str, text: str, *, arguments: str, elements: dict[str, int]) -> Launch:
    views = re.compile(r"reinterpret_tensor\((\w+), (?:\(.*?\), ){2}\d+\)")
    types = ast.literal_eval(re.findall(r"'signature': (\{.*?\})", text)[0])
    moved = {"load": 0, "store": 0}
    for (argument, kind), buffer in zip(types.items(), views.sub(r"\1", arguments).split(", "), strict=False):
        for way in moved if elements.get(buffer, 0) >= IGNORED_ELEMENTS else ():
            count = len(re.findall(rf"tl\.{way}\({argument}\b", text))
            # a kernel of ours computes its pointers, and reads what it reads again from a cache
            count = count if name.startswith("triton_") else min(count, 1)
            moved[way] += count * elements[buffer] * ITEM_BYTES[kind.lstrip("*")]
    return Launch(name, moved["load"], moved["store"])


def resnet50(*, ghosts: int) -> torch.nn.Module:
    """Make ResNet-50 as a bf16 run has it, in training mode."""
    norm = partial(GhostBatchNorm2d, bn_span=IMAGES // ghosts, ghosts_per_step=ghosts)
    model = build_model("resnet50", num_classes=1000, norm=norm).to(memory_format=torch.channels_last)
    to_half_(model, torch.bfloat16)
    statistics_N = flatten_running_statistics(model)
    MicrobatchStatistics(model, statistics_N, take=statistics_N.lerp_)
    return model.train()


def lower_regions(names: Iterable[str], *, ghosts: int) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each region's name, and the code of its forward and backward for a microbatch of IMAGES images."""
    codes: dict[str, str] = {}
    backend = lowering_backend(codes, play_h200())
    register_operators()
    model = resnet50(ghosts=ghosts)
    compile_regions_(model, mode=None, backend=backend)
    for name in names:
        channels, side = INPUTS[name.partition("+")[0]]
        images_BCHW = torch.empty(
            (IMAGES, channels, side, side), dtype=torch.bfloat16, memory_format=torch.channels_last
        )
        region = joined(model, name, backend=backend) if "." in name else getattr(model, name)
        codes.clear()
        try:
            region(images_BCHW.requires_grad_(name != "stem"))
        except Exception:
            if len(codes) < 2:  # else the region was called, whose code was not loaded
                raise
        yield name, codes


def joined(model: torch.nn.Module, name: str, *, backend: Callable[..., Any]) -> Callable[..., Any]:
    """Return a residual block, compiled as a region, or several as one region, whose names are joined by +."""
    blocks = [model.get_submodule(each) for each in name.split("+")]
    if len(blocks) == 1:
        return blocks[0]

    def forward(images_BCHW: torch.Tensor) -> torch.Tensor:
        for block in blocks:
            images_BCHW = type(block).forward(block, images_BCHW)  # not as the region that it is alone
        return images_BCHW

    return torch.compile(forward, fullgraph=True, dynamic=False, backend=backend)


def main(words: Iterable[str]) -> None:
    """Print a line of JSON per region: launches and GB of forward and of backward."""
    gc.disable()  # a tenth of the time
    options = {"ghosts": 4, "kernels": 0, "cubins": 0}
    settings: dict[str, int] = {}
    for key, _, value in (word.partition("=") for word in words if "=" in word):
        (options if key in options else settings)[key] = int(value)
    names = [word for word in words if "=" not in word] or SHORT
    with config.patch({**GPU_OPTIONS, **settings}):
        for name, found in lower_regions(names, ghosts=options["ghosts"]):
            row: dict[str, Any] = {"region": name}
            for way, code in found.items():
                rows = launches(code)
                num_bytes = sum(each.read_bytes + each.written_bytes for each in rows)
                row[way] = {"launches": len(rows), "gb": round(num_bytes / 1e9, 3)}
                if options["cubins"]:
                    row[way]["cubins"] = compile_kernels(code)
                if options["kernels"]:
                    row[way]["kernels"] = [asdict(each) for each in rows]
            print(json.dumps(row, indent=1 if options["kernels"] else None), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
