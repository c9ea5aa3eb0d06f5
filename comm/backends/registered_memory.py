"""GPU memory that NCCL sums in place: allocated by NCCL (ncclMemAlloc), and registered with a communicator."""

from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import CommError, first_line

SYMMETRIC_SINCE = (2, 27)
"""NCCL's first version with symmetric windows; with an older one torch would register plain buffers instead."""


class RegisteredMemory:
    """Makes GPU tensors that an NCCL group reads and writes without a copy into its buffers.

    is_symmetric: register them as symmetric windows, for NCCL's kernels over NVLink. Each tensor has a separate memory
    pool, so its registration begins and ends with it. All ranks of the group must make the same calls, because a window
    is registered by all together.
    Raises: CommError if torch, NCCL or the GPU cannot do this, which the constructor tests with a small tensor.
    """

    def __init__(self, group: Any, device: torch.device, *, is_symmetric: bool) -> None:
        self._device = device
        self._is_symmetric = is_symmetric
        self._pools: dict[int, Any] = {}
        version = torch.cuda.nccl.version()
        try:
            if is_symmetric and version < SYMMETRIC_SINCE:
                raise RuntimeError(f"symmetric windows need NCCL {'.'.join(map(str, SYMMETRIC_SINCE))}")
            self._nccl = group._get_backend(device)
            self._allocator = self._nccl.mem_allocator
            self.release(self.allocate(1, torch.float32))
        except (RuntimeError, AttributeError, TypeError) as error:  # the latter two: torch has other names
            raise CommError(
                f"comm.buffers={'symmetric' if is_symmetric else 'registered'} is not available with torch "
                f"{torch.__version__} and NCCL {'.'.join(map(str, version))} on {device} ({first_line(error)}): set it "
                "to torch"
            ) from error

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a flat, registered tensor of zeros. Collective."""
        with torch.cuda.device(self._device):
            pool = torch.cuda.MemPool(self._allocator)
            with torch.cuda.use_mem_pool(pool, self._device):
                tensor_N = torch.zeros(num_elements, dtype=dtype, device=self._device)
            self._nccl.register_mem_pool(pool, symm=self._is_symmetric)
        self._pools[tensor_N.data_ptr()] = pool
        return tensor_N

    def release(self, tensor_N: Tensor) -> None:
        """Deregister a tensor of allocate(); its memory is freed once unused. Collective. Waits for the GPU."""
        if pool := self._pools.pop(tensor_N.data_ptr(), None):  # else after close()
            torch.cuda.synchronize(self._device)  # NCCL may still use it
            self._nccl.deregister_mem_pool(pool)

    def close(self) -> None:
        """Deregister all remaining tensors, before their group ends. Collective; the second time, do nothing."""
        if self._pools:
            torch.cuda.synchronize(self._device)
        while self._pools:
            self._nccl.deregister_mem_pool(self._pools.popitem()[1])
