"""Memory that the ranks of one node share, so that sums inside a node need only short messages."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from errno import ENOSYS, EPERM
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.topology import Topology
from bigbatch.errors import CommError, first_line

if TYPE_CHECKING:
    from bigbatch.comm.backends.host_staging import HostStaging

SMALLEST_SCRATCH_BYTES = 1 << 20
PAGE_BYTES = 4096
"""Alignment of tensors in an allocation: no two share a page, so each page is placed by its tensor's first use."""
_APART = "or give each its own host name by BIGBATCH_HOST, so that they communicate as if on different hosts"


@dataclass(frozen=True)
class Region:
    """One tensor of allocate() as every rank of the node group has it, in the group's order."""

    index: int
    all: tuple[Tensor, ...]
    first: int
    """Address of this rank's first byte."""


class NodeMemory:
    """Makes host tensors that the other ranks of the node group can see. Linux; a group of one needs no sharing.

    The memory has no name in any file system and is freed with the last process that maps it, so a crash leaves nothing
    behind. All ranks of the job call the methods marked collective, in the same order.
    """

    def __init__(self, topology: Topology, control: Control) -> None:
        self._node = topology.node
        self._place = topology.node.index(topology.rank)
        self._needs_sharing = topology.num_nodes < topology.world_size
        self._control = control
        self._regions: list[Region] = []
        self._num_shared = 0
        self._scratch_N = torch.empty(0, dtype=torch.uint8)

    def allocate(self, *sizes: tuple[int, torch.dtype], what: str = "fusion buffers") -> list[Tensor]:
        """Return flat tensors of zeros that views() knows, one for each (number of elements, dtype). Collective.

        All of them together cost two gathers of texts, as one does.
        Raises: CommError if a rank of the same node cannot open the memory.
        """
        if not sizes:
            return []
        starts = [0]
        for num_elements, dtype in sizes:
            starts.append(starts[-1] + -(-max(1, num_elements * dtype.itemsize) // PAGE_BYTES) * PAGE_BYTES)
        wholes = (
            self._share(starts[-1], what=f"memory shared inside nodes for {what}")
            if self._needs_sharing
            else (torch.zeros(starts[-1], dtype=torch.uint8),)
        )
        tensors = []
        for start, (num_elements, dtype) in zip(starts, sizes, strict=False):
            parts = tuple(whole[start : start + max(1, num_elements * dtype.itemsize)] for whole in wholes)
            self._num_shared += 1
            own = parts[self._place]
            self._regions.append(Region(self._num_shared, parts, own.data_ptr()))
            tensors.append(own[: num_elements * dtype.itemsize].view(dtype))
        return tensors

    def release(self, tensor_N: Tensor) -> None:
        """Forget a tensor of allocate(); memory is freed once no tensor of that call is in use. Call on all ranks."""
        self._regions = [region for region in self._regions if region is not self._region_of(tensor_N)]

    def scratch(
        self, num_elements: int, dtype: torch.dtype, *, finish: Callable[[Tensor], None], what: str = "a tensor"
    ) -> Tensor:
        """Return shared memory for a copy of a tensor in other memory; its content is undefined. Collective.

        If the memory must grow, finish is called first, and memory returned earlier becomes invalid.
        """
        num_bytes = num_elements * dtype.itemsize
        if num_bytes > self._scratch_N.numel():
            if self._scratch_N.numel():
                finish(self._scratch_N)
                self.release(self._scratch_N)
            # a power of two, so that growing tensors cost a few collective allocations, not one each
            size = max(SMALLEST_SCRATCH_BYTES, 1 << (num_bytes - 1).bit_length())
            (self._scratch_N,) = self.allocate((size, torch.uint8), what=what)
        return self._scratch_N[:num_bytes].view(dtype)

    def operation(
        self,
        collective_: Callable[[Tensor], None],
        tensor_N: Tensor,
        staging: "HostStaging | None",
        *,
        finish: Callable[[], None],
        label: str,
    ) -> Callable[[], None]:
        """Return what the backend runs: the collective on the tensor, or on shared memory with copies there and back.

        staging: copies tensors of a GPU. finish: waits for all operations that were submitted. Collective; called
        seldom, because scratch memory doubles.
        """
        if self.views(tensor_N) is not None:
            return partial(collective_, tensor_N)

        def finish_and_unpin(outgrown_N: Tensor) -> None:
            finish()
            if staging is not None:
                staging.unpin(outgrown_N)

        scratch_N = self.scratch(tensor_N.numel(), tensor_N.dtype, finish=finish_and_unpin, what=label)
        if staging is None:

            def by_way_of_scratch() -> None:
                scratch_N.copy_(tensor_N)
                collective_(scratch_N)
                tensor_N.copy_(scratch_N)

            return by_way_of_scratch
        staging.pin(scratch_N)
        ready = staging.ready()  # recorded here, after the writes to the tensor; the other thread waits to read

        def by_way_of_host() -> None:
            staging.fetch(scratch_N, tensor_N, ready=ready)
            collective_(scratch_N)
            staging.copy_back(tensor_N, scratch_N)

        return by_way_of_host

    def views(self, tensor_N: Tensor) -> tuple[Tensor, ...] | None:
        """Return the corresponding tensor of every rank of the node group; None for a tensor in other memory."""
        region = self._region_of(tensor_N)
        if region is None:
            # a rank alone in its group shares nothing, but a transport of host tensors cannot read GPU memory
            return (tensor_N,) if tensor_N.device.type == "cpu" and not self._needs_sharing else None
        # addresses differ between processes, offsets do not
        start = tensor_N.data_ptr() - region.first
        return tuple(
            tensor_N if place == self._place else whole[start : start + tensor_N.nbytes].view(tensor_N.dtype)
            for place, whole in enumerate(region.all)
        )

    def name_of(self, tensor_N: Tensor) -> tuple[int, int, int]:
        """Return region, offset and size in bytes: equal on all ranks that sum the same tensor."""
        region = self._region_of(tensor_N)
        if region is None:
            return -1, 0, tensor_N.nbytes
        return region.index, tensor_N.data_ptr() - region.first, tensor_N.nbytes

    def _region_of(self, tensor_N: Tensor) -> Region | None:
        start = tensor_N.data_ptr()
        for region in self._regions:
            if region.first <= start and start + tensor_N.nbytes <= region.first + region.all[0].numel():
                return region
        return None

    def _share(self, num_bytes: int, *, what: str) -> tuple[Tensor, ...]:
        try:
            number = os.memfd_create("bigbatch")
        except (AttributeError, OSError) as error:  # Python may be built without it
            is_refused = getattr(error, "errno", None) in (EPERM, ENOSYS)
            advice = "let the container's seccomp profile allow it" if is_refused else "correct this"
            raise CommError(
                f"rank {self._control.rank} on {self._control.host} cannot make {what}: memfd_create fails "
                f"({first_line(error)}): {advice}; {_APART}"
            ) from error
        try:
            os.ftruncate(number, num_bytes)
            own = _map(number, num_bytes)
            # the inode shows a reader whether another process has taken these numbers since
            described = f"{os.getpid()} {number} {os.fstat(number).st_ino} {num_bytes}"
            everyone = self._control.gather(described, what=what)
            self._require_size(num_bytes, everyone, what=what)
            shared = tuple(
                own if place == self._place else self._open(everyone, place, num_bytes)
                for place in range(len(self._node))
            )
            self._control.gather_text("", what=what)  # all have opened it
        finally:
            # the mapping keeps the memory alive
            os.close(number)
        return shared

    def _require_size(self, num_bytes: int, everyone: Sequence[str], *, what: str) -> None:
        """Refuse ranks that ask for memory of different sizes: a page beyond another rank's would end the process."""
        for rank, text in enumerate(everyone):
            if (other := int(text.rpartition(" ")[2])) != num_bytes:
                raise CommError(
                    f"rank {rank} asks for {other} bytes of {what}, while rank {self._control.rank} asks for "
                    f"{num_bytes}: all ranks must sum tensors of equal size, in the same order"
                )

    def _open(self, everyone: Sequence[str], place: int, num_bytes: int) -> Tensor:
        peer = self._node[place]
        process, number, inode, _ = everyone[peer].split()
        path = Path("/proc", process, "fd", number)
        try:
            mine = os.open(path, os.O_RDWR)
        except OSError as error:
            raise self._refusal(peer, str(error.strerror)) from error
        try:
            if os.fstat(mine).st_ino != int(inode):
                raise self._refusal(peer, "another process has its number")
            return _map(mine, num_bytes)
        finally:
            os.close(mine)

    def _refusal(self, peer: int, reason: str) -> CommError:
        return CommError(
            f"rank {self._control.rank} cannot open the memory of rank {peer} on the same host {self._control.host} "
            f"({reason}): run all ranks of a host as one user, in one container; {_APART}"
        )


def _map(number: int, num_bytes: int) -> Tensor:
    # not by Python's mmap, which keeps a descriptor for each mapping: ranks of a large node have thousands
    return torch.from_file(f"/proc/self/fd/{number}", shared=True, size=num_bytes, dtype=torch.uint8)
