"""Check that global batch, microbatches, ghost batches and number of ranks fit each other."""

import math
from collections.abc import Iterator

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.sections import BatchConfig

LEAST_SPAN = 8
"""Smallest ghost batch that an error proposes: statistics of fewer images are too noisy."""


def check_batch(batch: BatchConfig) -> Iterator[str]:
    """Yield each error that does not depend on the number of ranks."""
    microbatch_size, bn_span = batch.microbatch_size, batch.bn_span
    if microbatch_size % bn_span and bn_span % microbatch_size:
        yield (
            f"batch.bn_span={bn_span} is neither a divisor nor a multiple of batch.microbatch_size={microbatch_size}: "
            f"{largest_divisor(microbatch_size, bn_span)} is"
        )
    elif batch.global_batch_size % max(microbatch_size, bn_span):
        divisor = f"batch.microbatch_size={microbatch_size}"
        remedy = _batch_remedy(batch, num_ranks=ranks_per_ghost(batch))
        if bn_span > microbatch_size:
            divisor = f"batch.bn_span={bn_span}"
            remedy += "" if batch.global_batch_size % microbatch_size else f", or batch.bn_span to {microbatch_size}"
        yield f"batch.global_batch_size={batch.global_batch_size} is not a multiple of {divisor}: {remedy}"
    elif batch.virtual_ranks is not None:
        fitting = _fitting_ranks(batch, limit=batch.virtual_ranks)
        if batch.virtual_ranks != fitting:
            yield (
                f"batch.virtual_ranks={batch.virtual_ranks} cannot share batch.global_batch_size="
                f"{batch.global_batch_size} in microbatches of {microbatch_size} and ghost batches of {bn_span}: "
                f"{fitting} can"
            )


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of number that is at most limit."""
    return next(d for d in range(min(number, limit), 0, -1) if number % d == 0)


def ranks_per_ghost(batch: BatchConfig) -> int:
    """Return the number of neighbouring ranks that share a ghost batch: 1 if a microbatch holds whole ones."""
    return max(1, batch.bn_span // batch.microbatch_size)


def ghosts_per_microbatch(batch: BatchConfig) -> int:
    """Return the number of ghost batches in a microbatch; 1 if it holds a part of one."""
    return max(1, batch.microbatch_size // batch.bn_span)


def accumulation_steps(batch: BatchConfig, *, world_size: int) -> int:
    """Return the number of microbatches per rank per update.

    Raises: ConfigError when the ranks do not divide the global batch into whole microbatches, cannot share ghost
    batches, or do not divide the virtual ranks.
    """
    _check_groups(batch, world_size=world_size)
    if batch.virtual_ranks is not None and batch.virtual_ranks % world_size:
        shares = ranks_per_ghost(batch)
        fitting = shares * largest_divisor(batch.virtual_ranks // shares, world_size // shares)
        raise ConfigError(
            f"batch.virtual_ranks={batch.virtual_ranks} is not a multiple of the {world_size} rank(s) of this job, "
            f"which are to do the same work each: start {fitting} rank(s)"
        )
    if batch.global_batch_size % (batch.microbatch_size * world_size):
        raise ConfigError(
            f"batch.global_batch_size={batch.global_batch_size} is not a multiple of "
            f"batch.microbatch_size={batch.microbatch_size} x {world_size} rank(s): "
            f"{_batch_remedy(batch, num_ranks=world_size)}"
        )
    return batch.global_batch_size // (batch.microbatch_size * world_size)


def _batch_remedy(batch: BatchConfig, *, num_ranks: int) -> str:
    """Return a remedy: a smaller microbatch, which keeps the update, else values that change the update."""
    whole = _fitting_microbatch(batch, num_ranks=num_ranks, least_shares=1, most_shares=1)
    shared = _fitting_microbatch(
        batch, num_ranks=num_ranks, least_shares=max(2, ranks_per_ghost(batch)), most_shares=batch.bn_span
    )
    per_step = batch.microbatch_size * num_ranks
    below = batch.global_batch_size // per_step * per_step
    other_batch = f"set batch.global_batch_size to {f'{below} or ' if below else ''}{below + per_step}"
    if ranks_per_ghost(batch) > 1:
        return f"set batch.microbatch_size to {shared}" if shared else other_batch
    if whole:
        return f"set batch.microbatch_size to {whole}"
    if shared:
        return f"{other_batch}, or, without mixup and cutmix, batch.microbatch_size to {shared}"
    together = largest_divisor(batch.global_batch_size, batch.bn_span) if num_ranks == 1 else 0
    if together < LEAST_SPAN or batch.virtual_ranks is not None:
        return other_batch
    return f"{other_batch}, or batch.microbatch_size and batch.bn_span to {together}"


def _fitting_microbatch(batch: BatchConfig, *, num_ranks: int, least_shares: int, most_shares: int) -> int | None:
    """Return the largest legal microbatch, up to the config's, if that many ranks share a ghost batch; else None."""
    for size in range(batch.microbatch_size, 0, -1):
        shares, rest = divmod(batch.bn_span, size) if size < batch.bn_span else (1, size % batch.bn_span)
        divides = rest == 0 and num_ranks % shares == 0 and batch.global_batch_size % (size * num_ranks) == 0
        if divides and least_shares <= shares <= most_shares:
            return size
    return None


def _check_groups(batch: BatchConfig, *, world_size: int) -> None:
    shares = ranks_per_ghost(batch)
    if world_size % shares == 0:
        return
    # the most ranks that could share a ghost batch in groups of equal size
    fewer = math.gcd(shares, world_size)
    size = batch.bn_span // fewer
    remedy = f"start {_fitting_ranks(batch, limit=world_size)} ranks"
    if batch.virtual_ranks is not None:
        remedy = (
            f"set batch.microbatch_size to {size} and batch.virtual_ranks to {batch.virtual_ranks * fewer // shares}"
        )
    elif batch.global_batch_size % (size * world_size) == 0:
        remedy = f"set batch.microbatch_size to {size}"
    raise ConfigError(
        f"batch.bn_span={batch.bn_span} is spread over {shares} ranks by batch.microbatch_size="
        f"{batch.microbatch_size}, and {world_size} rank(s) do not form such groups: {remedy}"
    )


def _fitting_ranks(batch: BatchConfig, *, limit: int) -> int:
    """Return the most ranks up to limit that can divide the global batch, or the fewest if all exceed limit."""
    shares, num_parts = ranks_per_ghost(batch), batch.global_batch_size // max(batch.bn_span, batch.microbatch_size)
    return shares * largest_divisor(num_parts, max(1, limit // shares))
