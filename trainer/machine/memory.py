"""Free the memory of a GPU or a CPU, and recognize their out-of-memory errors."""

import ctypes
import gc
import re

import torch

from bigbatch.errors import UserError

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
    elif not keeps_host:
        return_freed_memory()


def return_freed_memory() -> None:
    """Return the memory that glibc keeps to the system. Does nothing with another C library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
