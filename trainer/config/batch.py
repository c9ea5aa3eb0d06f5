"""Check that global batch, microbatches, ghost batches and number of ranks fit each other."""

from collections.abc import Iterator
from dataclasses import dataclass

from bigbatch.parts import load
from bigbatch.trainer.config.sections import BatchConfig
from bigbatch.words import count

ERRORS = "bigbatch.trainer.config.batch_remedy"
"""Module that is loaded for an error, or for virtual ranks."""


def check_batch(batch: BatchConfig) -> Iterator[str]:
    """Yield each error that does not depend on the number of ranks."""
    size, bn_span = batch.microbatch_size, batch.bn_span
    is_odd = (size % bn_span and bn_span % size) or batch.global_batch_size % max(size, bn_span)
    if is_odd or batch.virtual_ranks is not None:
        yield from load(f"{ERRORS}.refusals")(batch)


def ranks_per_ghost(batch: BatchConfig) -> int:
    """Return the number of neighbouring ranks that share a ghost batch: 1 if a microbatch holds whole ones."""
    return max(1, batch.bn_span // batch.microbatch_size)


def ghosts_per_microbatch(batch: BatchConfig) -> int:
    """Return the number of ghost batches in a microbatch; 1 if it holds a part of one."""
    return max(1, batch.microbatch_size // batch.bn_span)


@dataclass(frozen=True)
class Division:
    """Shares of the ranks in the microbatches of a global batch: as equal as possible, the first ranks take one more.

    The microbatches are numbered in the order of the global batch: number i is its i-th equal part.
    """

    num_microbatches: int
    """Microbatches of the global batch."""
    world_size: int
    ranks_per_ghost: int = 1
    """Neighbouring ranks that share each of their ghost batches; groups of several must have equal shares."""

    def of(self, rank: int) -> range:
        """Return the numbers of a rank's microbatches in a step.

        A rank that holds whole ghost batches takes consecutive microbatches. If ranks_per_ghost ranks share each ghost
        batch, microbatch k of each of them is its part of the group's k-th ghost batch. So a ghost batch consists of
        the same samples, in the same order, for any number of ranks that share it.
        """
        stride = self.ranks_per_ghost
        group, place = divmod(rank, stride)
        share, rest = divmod(self.num_microbatches // stride, self.world_size // stride)
        first = (group * share + min(group, rest)) * stride + place
        return range(first, first + (share + (group < rest)) * stride, stride)

    @property
    def most(self) -> int:
        """Return the number of microbatches of the rank with the most, for which the others wait in each step."""
        return len(self.of(0))

    @property
    def used_share(self) -> float:
        """Return the share of the ranks' time in which they have a microbatch to compute."""
        return self.num_microbatches / (self.world_size * self.most)


def shares(division: Division, microbatch_size: int) -> str:
    """Return the global batch as text: ranks x microbatches x images, or microbatches if the shares are not equal."""
    if division.used_share < 1:
        return f"{division.num_microbatches} microbatches x {microbatch_size} on {division.world_size} ranks"
    return f"{count(division.world_size, 'rank')} x {count(division.most, 'microbatch')} x {microbatch_size}"


def uneven(division: Division) -> str:
    """Return the line about ranks that wait for others in each step, because their shares are smaller."""
    num_more = sum(len(division.of(rank)) == division.most for rank in range(division.world_size))
    return (
        f"uneven shares: {count(num_more, 'rank')} x {division.most} and "
        f"{count(division.world_size - num_more, 'rank')} x {division.most - 1} microbatches in a step, which takes "
        f"as long as the larger share: {division.used_share:.0%} of the ranks' time is used"
    )


def divide_batch(batch: BatchConfig, *, world_size: int) -> Division:
    """Divide the global batch among the ranks of a job.

    Raises: ConfigError when there are more ranks than microbatches or virtual ranks, or when the ranks do not form
    groups that share ghost batches equally.
    """
    if not can_share(batch, world_size):
        raise load(f"{ERRORS}.misfit")(batch, world_size=world_size)
    return Division(batch.global_batch_size // batch.microbatch_size, world_size, ranks_per_ghost(batch))


def accumulation_steps(batch: BatchConfig, *, world_size: int) -> int:
    """Return the number of microbatches per update of the rank with the most. Raises: ConfigError, as divide_batch."""
    return divide_batch(batch, world_size=world_size).most


def can_share(batch: BatchConfig, num_ranks: int) -> bool:
    """Return whether so many ranks can share the batch."""
    most = batch.virtual_ranks or num_ranks
    return num_ranks <= most and fits(batch, batch.microbatch_size, num_ranks=num_ranks)


def fits(batch: BatchConfig, size: int, *, num_ranks: int) -> bool:
    """Return whether num_ranks can share the global batch in microbatches of size, a divisor or multiple of bn_span.

    Groups of several ranks need equal shares: all ranks exchange statistics at the same points of a step.
    """
    shares = max(1, batch.bn_span // size)
    num_parts, rest = divmod(batch.global_batch_size, size * shares)
    if rest or num_ranks % shares:
        return False
    num_groups = num_ranks // shares
    return num_parts >= num_groups if shares == 1 else num_parts % num_groups == 0
