"""Measure the gain of pinned memory: copy a microbatch to the device from pinned and from pageable memory."""

from functools import partial
from typing import Any

import torch

from bigbatch.trainer.preflight.rates import median_seconds


def measure_pinning(num_bytes: int, device: torch.device, *, seconds: float) -> dict[str, Any]:
    """Return the times of both copies, as the input makes them; or why there are none."""
    if device.type == "cpu":
        return {"why": "nothing is copied: a CPU computes on the memory that images are decoded into"}
    pageable_N = torch.ones(num_bytes, dtype=torch.uint8)
    pinned_N = pageable_N.pin_memory()
    pinned, pageable = (
        median_seconds(partial(each_N.to, device, non_blocking=True), device, seconds=seconds / 2)
        for each_N in (pinned_N, pageable_N)
    )
    return {"bytes": num_bytes, "pinned_seconds": pinned, "pageable_seconds": pageable}
