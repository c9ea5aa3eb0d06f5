"""Candidates for a speedup: changes of a config that keep its update, up to rounding."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.batch import accumulation_steps, largest_divisor, ranks_per_ghost
from bigbatch.trainer.config.schema import Config, with_values

MOST_MICROBATCHES = 8
FEWEST_IMAGES = 2
"""Least images of a ghost batch that is cut for a slow machine: statistics need two."""


@dataclass(frozen=True)
class Machine:
    """Describes the machine of the ranks."""

    device: str
    device_type: str
    capability: tuple[int, int] | None
    """Compute capability of a CUDA device."""
    num_cores: int
    """Cores that each rank may use."""
    world_size: int
    num_threads: int = 1
    """Threads of torch on each rank."""
    has_cpu_bf16: bool = False
    """The CPU multiplies bfloat16 itself: AVX-512 BF16 or AMX."""

    @property
    def is_gpu(self) -> bool:
        """Tell whether it is a CUDA device."""
        return self.device_type == "cuda"


def part_of_step(config: Config, *, world_size: int) -> Config:
    """Take the same microbatches, but no more than MOST_MICROBATCHES of each rank in a step. Raises: ConfigError.

    One rank alone would have 256 of them in a step that many ranks share otherwise.
    """
    steps = accumulation_steps(config.batch, world_size=world_size)
    kept = largest_divisor(steps, MOST_MICROBATCHES)
    if kept == steps:
        return config
    # a divisor of the steps, so that ghost batches still fill the smaller step
    size = config.batch.global_batch_size // steps * kept
    return dataclasses.replace(
        config, batch=dataclasses.replace(config.batch, global_batch_size=size, virtual_ranks=None)
    )


def part_of_images(config: Config, num_images: float, *, world_size: int) -> dict[str, Any]:
    """Return values that cut a step to about that many images per rank; none if it has no more.

    First fewer microbatches, then smaller ones of whole ghost batches, then also smaller ghost batches. For
    measurements only: all values except the first kind change the update.
    """
    batch = config.batch
    size, span, shares = batch.microbatch_size, batch.bn_span, ranks_per_ghost(batch)
    steps = accumulation_steps(batch, world_size=world_size)
    if num_images >= steps * size:
        return {}
    kept = 1
    if num_images >= size:
        kept = largest_divisor(steps, int(num_images // size))
    elif num_images >= span:  # several fit into a microbatch
        size = span * largest_divisor(size // span, int(num_images // span))
    else:
        size = min(size, max(FEWEST_IMAGES, int(num_images)))
        span = size * shares
    return {
        "batch.global_batch_size": world_size * kept * size,
        "batch.microbatch_size": size,
        "batch.bn_span": span,
        "batch.virtual_ranks": None,
    }


@dataclass(frozen=True)
class Candidate:
    """Settings that may be faster and keep the update, up to rounding."""

    name: str
    values: Mapping[str, Any] = field(hash=False)
    note: str = ""


@dataclass(frozen=True)
class Unmeasured:
    """A speedup that cannot be tried on this machine."""

    name: str
    why: str


def change(config: Config, values: Mapping[str, Any], *, world_size: int) -> Config | str:
    """Return the config with these values by dotted key; or the reason why it is not legal."""
    try:
        changed = with_values(config, values)
        accumulation_steps(changed.batch, world_size=world_size)
    except ConfigError as error:
        return str(error)
    return changed
