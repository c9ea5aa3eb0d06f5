"""Milliseconds of a step's kernels by what they compute: ours in three modes, and torchvision's script."""

from collections import Counter
from contextlib import closing
from typing import Any

from torch.profiler import profile

from benchmarks.gpu.suite import torchvision_peer
from benchmarks.gpu.suite.context import TOO_LONG, Context, Found
from benchmarks.gpu.suite.job import Contestant, contestant, seconds_of, settings_for
from benchmarks.gpu.suite.training import MODES
from bigbatch.tools.doctor.profile import activities_on
from bigbatch.trainer.step.cuda_graph import WARM_UP_STEPS

KINDS = {
    "max-pool": ("max_pool",),
    "norm, ReLU and add": ("triton_", "batch_norm", "batchnorm", "threshold", "clamp", "CUDAFunctor_add<c10"),
    "optimizer": ("multi_tensor",),
    "convolutions and products": ("conv", "fprop", "grad", "gemm", "nvjet", "cublas", "cutlass", "cudnn"),
}
"""Kind -> words in kernels' names; the first kind with a match counts. Kernels of torch's compiler count as norms."""
PROFILED = 2
"""Steps under the profiler."""


def measure(context: Context) -> Found:
    """Measure steps of the batch, and captured ones of 32 images, whose launches and small kernels weigh more."""
    found, size, rows = Found(), context.size, []
    peer = torchvision_peer.peer_name(context)
    for name, batch in (*((mode, size.batch) for mode in MODES), ("cuda_graph", min(size.local_batches[1], 32))):
        if MODES[name] and not context.compiles:
            found.left_out[name] = TOO_LONG
            continue
        settings = settings_for(size, batch=batch, precision=context.precision) | MODES[name]
        with closing(contestant(settings, with_nccl=context.device.type == "cuda")) as each:
            rows.append(row_of(f"{name}, {batch} images", each, context, found))
    batches = torchvision_peer.generated_batches(context)
    with closing(torchvision_peer.peer(context, batches, num_classes=size.num_classes)) as each:
        rows.append(row_of(f"{peer}, {size.batch} images", each, context, found))
    found.tables["kernels, ms"] = rows
    return found


def row_of(name: str, each: Contestant, context: Context, found: Found) -> dict[str, Any]:
    """Time steps, profile two more, and return milliseconds of a step by kind of kernel; of operators on a CPU."""
    steps, device = context.size.steps, context.device
    each.flags.switch()
    each.run(1 if device.type == "cpu" else WARM_UP_STEPS + 2)  # cuDNN's search, and the capture
    seconds = [seconds_of(lambda: each.run(steps), device=device) / steps for _ in range(context.size.rounds)]
    found.add(name, seconds, unit="s")
    with profile(activities=activities_on(device)) as seen:
        seconds_of(lambda: each.run(PROFILED), device=device)
    sums, count = Counter[str](), 0
    for event in seen.events() or ():
        if event.device_type.name.lower() == device.type and not event.is_user_annotation:  # which holds kernels
            own = event.self_cpu_time_total if device.type == "cpu" else event.time_range.elapsed_us()
            sums[kind_of(event.name)] += own
            count += 1
    milliseconds = {kind: sums[kind] / 1e3 / PROFILED for kind in (*KINDS, "other")}
    return {"step": name, "kernels": count // PROFILED, **milliseconds}


def kind_of(name: str) -> str:
    """Return the kind of a kernel."""
    return next((kind for kind, words in KINDS.items() if any(word in name for word in words)), "other")
