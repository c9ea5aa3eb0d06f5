"""How ranks and microbatches divide a global batch: whole numbers only."""


def rank_microbatches(*, rank: int, accumulation_steps: int, ranks_per_ghost: int) -> range:
    """Return the numbers of this rank's microbatches in a step: number i holds the global batch's i-th equal part.

    A rank takes neighbours, where it holds whole ghost batches. Where ranks_per_ghost neighbouring ranks share each of
    theirs, microbatch k of each rank is its part of the group's k-th ghost batch. So a ghost batch consists of the same
    samples, and the group sees its ghost batches in the same order, however they are spread.
    """
    group, place = divmod(rank, ranks_per_ghost)
    first = group * accumulation_steps * ranks_per_ghost + place
    return range(first, first + accumulation_steps * ranks_per_ghost, ranks_per_ghost)
