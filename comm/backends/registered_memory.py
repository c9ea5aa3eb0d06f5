"""GPU memory that NCCL sums where it lies: of NCCL's own making (ncclMemAlloc), and registered with a communicator."""

from typing import Any

import torch
from torch import Tensor

from bigbatch.errors import CommError, first_line

SYMMETRIC_SINCE = (2, 27)
"""NCCL's first version that has symmetric windows; torch would register an older one's memory otherwise, unasked."""


class RegisteredMemory:
    """Makes GPU tensors that a group of NCCL's reads and writes without a copy into buffers of its own.

    is_symmetric: as windows that all ranks have at the same place, for NCCL's kernels over NVLink. Each tensor has a
    pool of its own, so that all that is registered is there, and goes with it.
    Methods are called by all ranks of the group alike: a window is made by all together.
    Raises: CommError where torch, NCCL or the GPU cannot do this, found out by a first, small tensor.
    """

    def __init__(self, group: Any, device: torch.device, *, is_symmetric: bool) -> None:
        self._device = device
        self._is_symmetric = is_symmetric
        self._pools: dict[int, Any] = {}
        version = torch.cuda.nccl.version()
        try:
            if is_symmetric and version < SYMMETRIC_SINCE:
                raise RuntimeError(f"symmetric windows came with NCCL {'.'.join(map(str, SYMMETRIC_SINCE))}")
            self._nccl = group._get_backend(device)
            self._allocator = self._nccl.mem_allocator
            self.release(self.allocate(1, torch.float32))
        except (RuntimeError, AttributeError, TypeError) as error:  # the latter two of a torch that has other names
            raise CommError(
                f"comm.buffers={'symmetric' if is_symmetric else 'registered'} is not to be had with torch "
                f"{torch.__version__} and NCCL {'.'.join(map(str, version))} on {device} ({first_line(error)}): set it "
                "to torch"
            ) from error

    def allocate(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Make a flat tensor of zeros. Collective."""
        with torch.cuda.device(self._device):
            pool = torch.cuda.MemPool(self._allocator)
            with torch.cuda.use_mem_pool(pool, self._device):
                tensor_N = torch.zeros(num_elements, dtype=dtype, device=self._device)
            self._nccl.register_mem_pool(pool, symm=self._is_symmetric)
        self._pools[tensor_N.data_ptr()] = pool
        return tensor_N

    def release(self, tensor_N: Tensor) -> None:
        """Take out what allocate() gave; its memory is free once no tensor uses it. Collective. Waits for the GPU."""
        torch.cuda.synchronize(self._device)  # NCCL may still be at it
        self._nccl.deregister_mem_pool(self._pools.pop(tensor_N.data_ptr()))

    def close(self) -> None:
        """Take out all that is left, before its group ends. Collective; the second time, do nothing."""
        if self._pools:
            torch.cuda.synchronize(self._device)
        while self._pools:
            self._nccl.deregister_mem_pool(self._pools.popitem()[1])
