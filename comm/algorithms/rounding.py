"""Estimate the error of sums over ranks that are rounded at each hop, in words for the log."""

from bisect import bisect_right
from collections.abc import Sequence

import torch

from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.base import HALF, Backend, dtype_name

LOST = ((0.25, "1%"), (0.5, "4%"), (1.0, "7%"), (2.0, "25%"), (4.0, "60%"), (8.0, "80%"))
"""(hops * u, error where ranks agree but for a tenth): benchmarks/results/comm-rounding.json, ring, bf16 and fp16."""


def rounding_note(
    algorithms: Sequence[str], wire: Wire, *, dtype: torch.dtype, backend: Backend, num_nodes: int
) -> str:
    """Return a line on the error of these sums, or on a wire_dtype that saves nothing; "" if there is nothing to say.

    The error is for ranks that agree, where partial sums outgrow each term; doubling has too few hops to matter.
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
    place = bisect_right([at for at, _ in LOST], num_hops * torch.finfo(travels_as).eps / 2)
    if not place:
        return ""
    return (
        f"comm.reduce_dtype=wire rounds to {dtype_name(travels_as)} at each of up to {num_hops} hops: sums may be "
        f"wrong by {LOST[place - 1][1]} or more where gradients of ranks agree; fp32 keeps them within one rounding"
    )
