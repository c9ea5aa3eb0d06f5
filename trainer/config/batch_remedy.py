"""Find a batch, a microbatch or a number of ranks that fits, for the error that refuses others."""

import math
from collections.abc import Iterator

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.batch import Division, fits, ranks_per_ghost
from bigbatch.trainer.config.sections import BatchConfig
from bigbatch.words import count

MIN_SPAN = 8
"""Smallest ghost batch that an error proposes: statistics of fewer images are too noisy."""


def refusals(batch: BatchConfig) -> Iterator[str]:
    """Yield each error that does not depend on the number of ranks."""
    microbatch_size, bn_span = batch.microbatch_size, batch.bn_span
    if microbatch_size % bn_span and bn_span % microbatch_size:
        yield (
            f"batch.bn_span={bn_span} is neither a divisor nor a multiple of batch.microbatch_size={microbatch_size}: "
            f"{largest_divisor(microbatch_size, bn_span)} is"
        )
    elif batch.global_batch_size % max(microbatch_size, bn_span):
        divisor = f"batch.microbatch_size={microbatch_size}"
        remedy = _remedy(batch, num_ranks=ranks_per_ghost(batch))
        if bn_span > microbatch_size:
            divisor = f"batch.bn_span={bn_span}"
            remedy += "" if batch.global_batch_size % microbatch_size else f", or batch.bn_span to {microbatch_size}"
        yield f"batch.global_batch_size={batch.global_batch_size} is not a multiple of {divisor}: {remedy}"
    elif (ranks := batch.virtual_ranks) is not None and ranks != (fitting := _fitting_ranks(batch, limit=ranks)):
        yield (
            f"batch.virtual_ranks={ranks} cannot share batch.global_batch_size={batch.global_batch_size} in "
            f"microbatches of {microbatch_size} and ghost batches of {bn_span}: {fitting} can"
        )


def misfit(batch: BatchConfig, *, world_size: int) -> ConfigError:
    """Return the error for ranks that cannot share the batch."""
    if batch.virtual_ranks is not None and batch.virtual_ranks < world_size:
        return ConfigError(
            f"batch.virtual_ranks={batch.virtual_ranks} is less than the {world_size} ranks of this job: leave it out, "
            f"or start {count(_fitting_ranks(batch, limit=batch.virtual_ranks), 'rank')}"
        )
    size, shares = batch.microbatch_size, ranks_per_ghost(batch)
    if world_size % shares:
        return _misfit_of_groups(batch, world_size=world_size)
    what = f"{count(batch.global_batch_size // size, 'microbatch')}, fewer than {world_size} ranks"
    if shares > 1:
        num_ghosts = batch.global_batch_size // batch.bn_span
        what = f"{num_ghosts} ghost batches, which {world_size // shares} groups of {shares} ranks cannot divide"
    return ConfigError(
        f"batch.global_batch_size={batch.global_batch_size} with batch.microbatch_size={size} has {what}: "
        f"{_remedy(batch, num_ranks=world_size)}"
    )


def largest_divisor(number: int, limit: int) -> int:
    """Return the largest divisor of number that is at most limit."""
    return max(divisor for divisor in divisors(number) if divisor <= limit)


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order, found up to the root: the number may come from a hostile config."""
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return [*low, *(number // each for each in reversed(low) if each * each != number)]


def _remedy(batch: BatchConfig, *, num_ranks: int) -> str:
    """Return a remedy: a smaller microbatch, which keeps the update, else values that change the update."""
    whole = _fitting_microbatch(batch, num_ranks=num_ranks, min_shares=1, max_shares=1)
    shared = _fitting_microbatch(
        batch, num_ranks=num_ranks, min_shares=max(2, ranks_per_ghost(batch)), max_shares=batch.bn_span
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
    if together < MIN_SPAN or batch.virtual_ranks is not None:
        return other_batch
    return f"{other_batch}, or batch.microbatch_size and batch.bn_span to {together}"


def _fitting_microbatch(batch: BatchConfig, *, num_ranks: int, min_shares: int, max_shares: int) -> int | None:
    """Return the legal microbatch, up to the config's, with the most equal shares of the ranks; the largest of several.

    None if no microbatch spreads a ghost batch over min_shares to max_shares ranks.
    """
    largest_shares = {}
    for size in (size for size in reversed(divisors(batch.global_batch_size)) if size <= batch.microbatch_size):
        shares, rest = divmod(batch.bn_span, size) if size < batch.bn_span else (1, size % batch.bn_span)
        if rest == 0 and min_shares <= shares <= max_shares and fits(batch, size, num_ranks=num_ranks):
            largest_shares[size] = size * Division(batch.global_batch_size // size, num_ranks, shares).most
    return min(largest_shares, key=largest_shares.__getitem__, default=None)


def _misfit_of_groups(batch: BatchConfig, *, world_size: int) -> ConfigError:
    """Return the error for ranks that cannot form groups that share ghost batches."""
    shares = ranks_per_ghost(batch)
    # the most ranks that could share a ghost batch in groups of equal size
    fewer = math.gcd(shares, world_size)
    size = batch.bn_span // fewer
    remedy = f"start {count(_fitting_ranks(batch, limit=world_size), 'rank')}"
    if fits(batch, size, num_ranks=world_size):
        remedy = f"set batch.microbatch_size to {size}"
        if batch.virtual_ranks is not None:
            remedy += f" and batch.virtual_ranks to {batch.virtual_ranks * fewer // shares}"
    return ConfigError(
        f"batch.bn_span={batch.bn_span} is spread over {shares} ranks by batch.microbatch_size="
        f"{batch.microbatch_size}, and {count(world_size, 'rank')} cannot form such groups: {remedy}"
    )


def _fitting_ranks(batch: BatchConfig, *, limit: int) -> int:
    """Return the most ranks up to limit that can share the global batch, or the fewest if all exceed limit."""
    shares, num_parts = ranks_per_ghost(batch), batch.global_batch_size // max(batch.bn_span, batch.microbatch_size)
    if shares == 1:
        return min(limit, num_parts)
    return shares * largest_divisor(num_parts, max(1, limit // shares))
