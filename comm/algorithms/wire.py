"""Precision in which values travel between ranks and are summed; a note on the error of sums rounded at each hop."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbatch.comm.backends.base import HALF, Backend, dtype_name


@dataclass(frozen=True)
class Wire:
    """Precision in which fp32 values travel between ranks (None: fp32); tensors of other dtypes keep theirs.

    A half-precision wire halves the bytes. With in_fp32, sums over ranks are made in fp32: each node's term is rounded
    to the wire once, and the result once, for any number of ranks. Without it, each hop rounds the partial sum to the
    wire, so the error of n terms is at most n roundings. Tensors that travel in fp32 or wider are not affected.
    predivide: each term is divided by it before the sum, and the sum multiplied by it afterwards, because partial sums
    beyond 65,504 overflow fp16. A power of two changes only the smallest values.
    """

    dtype: torch.dtype | None = None
    predivide: float = 1.0
    in_fp32: bool = True

    def of(self, tensor_N: Tensor) -> torch.dtype:
        """Return the dtype in which this tensor travels."""
        return self.dtype if self.dtype is not None and tensor_N.dtype == torch.float32 else tensor_N.dtype

    def sums_in_fp32(self, tensor_N: Tensor) -> bool:
        """Return whether this tensor travels in less than fp32 and must be summed in fp32."""
        return self.in_fp32 and self.of(tensor_N) in HALF

    def widens(self, backend: Backend) -> bool:
        """Return whether the backend's own sums need fp32 input, because the backend would round each addition."""
        return self.in_fp32 and not backend.capabilities.sums_half_in_fp32

    @contextmanager
    def widened(self, tensor_N: Tensor, backend: Backend) -> Iterator[Tensor]:
        """Yield tensor_N as the backend's own sum needs it: itself, or an fp32 copy that is rounded afterwards."""
        if tensor_N.dtype not in HALF or not self.widens(backend):
            yield tensor_N
            return
        wide_N = tensor_N.float()
        yield wide_N
        tensor_N.copy_(wide_N)

    def divide_(self, own_S: Tensor) -> None:
        """Divide this rank's own term by predivide, if it travels in a narrower precision."""
        if self.predivide != 1.0 and self.of(own_S) != own_S.dtype:
            own_S.mul_(1.0 / self.predivide)

    def add_(self, own_S: Tensor, terms: Sequence[Tensor], *, scaled: bool = False) -> None:
        """Add terms to own_S, which is divided already. scaled: divide the terms, too, while adding."""
        scale = 1.0 / self.predivide if scaled and self.of(own_S) != own_S.dtype else 1.0
        if own_S.dtype in HALF and terms:
            total_S = own_S.float()
            for term_S in terms:
                total_S.add_(term_S)
            own_S.copy_(total_S)
            return
        for term_S in terms:
            # integers travel unchanged and take no fraction
            own_S.add_(term_S, alpha=scale if scale != 1.0 else 1)

    def pack(self, own_S: Tensor, packed_S: Tensor) -> Tensor:
        """Return the tensor to send: packed_S, rounded to the wire's precision; own_S itself if it is not rounded."""
        if packed_S.dtype == own_S.dtype:
            return own_S
        return packed_S.copy_(own_S)

    def unpack_(self, own_S: Tensor, packed_S: Tensor) -> None:
        """Write the final value into own_S, from the packed bits that all ranks have received."""
        if packed_S.dtype != own_S.dtype:
            own_S.copy_(packed_S)
            if self.predivide != 1.0:
                own_S.mul_(self.predivide)

    def round_(self, own_N: Tensor) -> None:
        """Round a sum that has travelled in fp32 to the wire's precision, as sums by other algorithms are."""
        self.divide_(own_N)
        self.unpack_(own_N, own_N.to(self.of(own_N)))


class Staging:
    """Scratch memory of an algorithm, grown as needed."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, use: str, num_elements: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Return an undefined tensor on the device of like, valid until the next take() for the same use."""
        num_bytes = num_elements * dtype.itemsize
        kept_N = self._kept.get(use)
        if kept_N is None or kept_N.numel() < num_bytes or kept_N.device != like.device:
            kept_N = torch.empty(num_bytes, dtype=torch.uint8, device=like.device)
            self._kept[use] = kept_N
        return kept_N[:num_bytes].view(dtype)


HOP_ERRORS = ((0.25, "1%"), (0.5, "4%"), (1.0, "7%"), (2.0, "25%"), (4.0, "60%"), (8.0, "80%"))
"""(hops * u, error if the ranks' values differ by a tenth): benchmarks/results/comm-rounding.json, ring, bf16, fp16."""


def rounding_note(
    algorithms: Sequence[str], wire: Wire, *, dtype: torch.dtype, backend: Backend, num_nodes: int
) -> str:
    """Return a line on the error of these sums, or on a wire_dtype that saves nothing; "" if there is nothing to say.

    The error is for ranks with similar gradients, whose partial sums outgrow each term; doubling has too few hops.
    """
    travels_as = wire.of(torch.empty(0, dtype=dtype))
    if backend.world_size == 1 or travels_as not in HALF:
        return ""
    rounds = not backend.capabilities.sums_half_in_fp32
    if wire.in_fp32:
        saves_nothing = rounds and "native" in algorithms and travels_as != dtype
        return (
            f"{backend.name} sums in fp32, so comm.wire_dtype saves no bytes: set comm.reduce_dtype to wire, or "
            "comm.wire_dtype to null"
            if saves_nothing
            else ""
        )
    chains = {"native": backend.world_size * rounds, "ring": backend.world_size, "doubling": 0}
    num_hops = max(chains.get(name, num_nodes) for name in algorithms)
    place = bisect_right([at for at, _ in HOP_ERRORS], num_hops * torch.finfo(travels_as).eps / 2)
    if not place:
        return ""
    return (
        f"comm.reduce_dtype=wire rounds to {dtype_name(travels_as)} at each of up to {num_hops} hops: sums may be "
        f"wrong by {HOP_ERRORS[place - 1][1]} or more where gradients of ranks agree; fp32 keeps them within a rounding"
    )
