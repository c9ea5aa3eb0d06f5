"""How a process uses its host and GPU: cores, memory that is kept or used up, and imports of torch."""

import ctypes
import gc
import re
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from bigbatch.boot import boot_id
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import Connection
from bigbatch.comm.rendezvous.environ import ProcessEnv, set_deterministic_libraries
from bigbatch.cores import usable_cores
from bigbatch.errors import UserError
from bigbatch.user_settings import list_gpu_first, lists_gpu_first

_CUDA_ERROR_NOT_INITIALIZED = 3
"""cuda.h's. cuInit reads CUDA_VISIBLE_DEVICES."""
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
"""glibc's malloc.h."""


def set_up_process(
    communicator: Communicator, *, cudnn_benchmark: bool, is_reproducible: bool = False, cpu_threads: int | None = None
) -> None:
    """Set up the process once, before training: cuDNN's search on a GPU; cores and memory on a CPU. Collective.

    is_reproducible: deterministic kernels only; torch raises an error that names an operator without one.
    """
    if is_reproducible:
        set_deterministic(2)
    if communicator.device.type == "cuda":
        torch.backends.cudnn.benchmark = cudnn_benchmark and not is_reproducible
        return
    # collective: on all ranks, with or without a stated number
    share = cores_per_rank(communicator.connection)
    torch.set_num_threads(cpu_threads or (1 if is_reproducible else share))
    keep_freed_memory()


def set_deterministic(mode: int) -> None:
    """Set torch's deterministic mode: 0 off, 1 warn, 2 error, as torch.get_deterministic_debug_mode() returns it.

    torch.use_deterministic_algorithms() would load torch's compiler for its own switch: for seconds, and it leaves a
    folder in /tmp.
    """
    if mode:
        set_deterministic_libraries()
    torch.set_deterministic_debug_mode(mode)
    if "torch._inductor.config" in sys.modules:
        torch.use_deterministic_algorithms(mode > 0, warn_only=mode == 1)


def cores_per_rank(connection: Connection) -> int:
    """Return this rank's share of the cores that it may use. Collective.

    Hosts that share a kernel share its cores: containers, pods without dedicated cores, emulated nodes.
    """
    cores = usable_cores()
    mine = f"{boot_id() or connection.env.host} {cores}"
    return max(1, len(cores) // connection.gather(mine).count(mine))


def has_cpu_bf16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the CPU has bfloat16 multiplication; False if unknown."""
    try:
        flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
    except OSError:
        return False
    return not {"avx512_bf16", "amx_bf16"}.isdisjoint(flags.split())


def keep_freed_memory() -> None:
    """Let glibc keep freed activation memory instead of returning it and faulting it in again at every step.

    ResNet-9 of width 16 in fp32 on one core: a step of 64 images of 64 x 64 takes 210 ms instead of 245 (median of
    3, 2 cores, torch 2.14.1), for 2% more memory. Does nothing with another C library.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_TOP_PAD, 64 << 20)):
            mallopt(option, value)


def skip_compiler_import() -> None:
    """Keep bigbatch's optimizers from importing torch's compiler, a slow import, in this whole process.

    torch excludes four methods of all optimizers from compilation, and imports the compiler for that at their first
    call; a process that only trains compiles no optimizer. torch's own optimizers import it in their steps, too. The
    attribute is private to torch: a torch without it imports the compiler as before. A run of two steps of ResNet-9 on
    one core, start and plot included: 6.4 s instead of 8.4 (median of 3 pairs, 2 cores, torch 2.14.1).
    """
    for name in ("add_param_group", "load_state_dict", "state_dict", "zero_grad"):
        method = getattr(getattr(torch.optim.Optimizer, name), "__wrapped__", None)
        if method is not None:
            vars(method).setdefault("__dynamo_disable", method)


def list_own_gpu_first(env: ProcessEnv, *, backend: str) -> None:
    """Let CUDA list this rank's GPU first in this process, as device 0, so that ranks of a host share compiled code.

    For all ranks but a host's first one, whose GPU is device 0 already. Compiled code holds its device's index. All
    GPUs stay visible: NCCL finds those of its peers by their PCI addresses.
    Does nothing once CUDA has started, or for another backend than NCCL: Open MPI compares the indices of its peers.
    """
    if env.keeps_to_cpu or torch.version.cuda is None or lists_gpu_first(env.local_rank):
        return
    count = torch.cuda.device_count()  # by NVML, which does not start CUDA
    if backend in ("auto", "nccl") and env.local_size <= count and not _has_cuda_started():
        list_gpu_first(env.local_rank, num_ranks=env.local_size, count=count)


def _has_cuda_started() -> bool:
    """Return whether CUDA has read its variables in this process; True if unknown."""
    try:
        status = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int()))
    except OSError:
        return True
    return bool(status != _CUDA_ERROR_NOT_INITIALIZED)


def wait_for(device: torch.device) -> None:
    """Wait until a device has finished all queued work; returns at once for a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of work, from an idle device to the end of all that it has queued."""
    wait_for(device)
    start = time.perf_counter()
    work()
    wait_for(device)
    return time.perf_counter() - start


NO_MEMORY = re.compile(
    r"can't allocate memory|not enough memory|out of memory|_ALLOC_FAILED|could not (create|execute) a primitive$"
    r"|unable to find an engine to execute|bad_alloc",
    re.I,
)
"""Words of torch, C++, CUDA, oneDNN and cuDNN in an out-of-memory RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error of a GPU or a CPU."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    is_torchs = isinstance(error, RuntimeError) and not isinstance(error, UserError)
    return is_torchs and NO_MEMORY.search(str(error)) is not None


def free_memory(device: torch.device, *, keeps_host: bool = False) -> None:
    """Free the memory of unreferenced objects. keeps_host: keep freed memory of the host in this process."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif not keeps_host and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):  # glibc's
        trim(0)


def set_tf32(is_allowed: bool, *, precision: str | None = None) -> None:
    """Set whether fp32 convolutions and matrix products of GPUs round their factors to TF32, in this whole process.

    precision: torch's word for products, if it differs.
    """
    with warnings.catch_warnings():
        # torch announces another way, with which its max-autotune fails (docs/decisions/042)
        warnings.simplefilter("ignore")
        torch.set_float32_matmul_precision(precision or ("high" if is_allowed else "highest"))
        torch.backends.cudnn.allow_tf32 = is_allowed
