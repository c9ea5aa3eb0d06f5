"""Copies of GPU tensors in host memory, for transports that cannot read GPU memory."""

import torch
from torch import Tensor


class HostStaging:
    """Copies tensors between a GPU and host memory on a separate stream, concurrently with backward's kernels."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pinned: set[tuple[int, int]] = set()

    def pin(self, host_N: Tensor) -> None:
        """Pin host memory, which makes copies fast and asynchronous; once for each allocation."""
        piece = _allocation_of(host_N)
        if piece not in self._pinned:
            with torch.cuda.device(self._stream.device):
                torch.cuda.check_error(int(torch.cuda.cudart().cudaHostRegister(*piece, 0)))
            self._pinned.add(piece)

    def unpin(self, host_N: Tensor) -> None:
        """Unpin memory that was pinned, before it is freed; waits on the host until copies are done."""
        piece = _allocation_of(host_N)
        if piece in self._pinned:
            self._pinned.remove(piece)
            self._stream.synchronize()
            with torch.cuda.device(self._stream.device):
                torch.cuda.check_error(int(torch.cuda.cudart().cudaHostUnregister(piece[0])))

    def ready(self) -> torch.cuda.Event:
        """Mark the calling thread's GPU work so far; the thread that fetches waits for it."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    def fetch(self, host_N: Tensor, device_N: Tensor, *, ready: torch.cuda.Event) -> None:
        """Copy a tensor to the host after the event ready; return when the copy is complete."""
        self._stream.wait_event(ready)
        self._copy(host_N, device_N)
        self._stream.synchronize()

    def copy_back(self, device_N: Tensor, host_N: Tensor) -> None:
        """Start to copy to the GPU, without waiting on the host; follow it with join() or another fetch."""
        self._copy(device_N, host_N)

    def join(self) -> None:
        """Order the calling thread's further GPU work behind the copies that were started."""
        torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def _copy(self, target_N: Tensor, source_N: Tensor) -> None:
        # a new thread's current GPU is 0: leaving a stream context without this one would create a CUDA context there
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            target_N.copy_(source_N, non_blocking=True)


def _allocation_of(host_N: Tensor) -> tuple[int, int]:
    """Return address and bytes of a tensor's allocation, which holds many tensors; CUDA registers it only once."""
    return host_N.untyped_storage().data_ptr(), host_N.untyped_storage().nbytes()
