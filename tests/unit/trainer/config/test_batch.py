"""Which batches, ghost batches and ranks go together, and that each remedy named is legal."""

import re

import numpy as np
import pytest
from error_texts import naming
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.batch import Division, accumulation_steps, divide_batch
from bigbatch.trainer.config.batch_remedy import divisors
from tests.unit.trainer.config.test_schema import make_config, refusal

Batch = dict[str, int | None]


def job_refusal(changes: Batch, *, world_size: int) -> str:
    """Return the error of a job of so many ranks for a config that is legal by itself."""
    with pytest.raises(ConfigError) as caught:
        accumulation_steps(make_config(changes).batch, world_size=world_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("world_size", "expected"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_accumulation_steps(world_size, expected):
    assert accumulation_steps(make_config().batch, world_size=world_size) == expected
    replay = make_config({"batch.virtual_ranks": 4}).batch
    assert accumulation_steps(replay, world_size=world_size) == expected


@given(number=st.integers(1, 3000))
def test_divisors_are_those_of_trial_division(number):
    assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]


@given(num_microbatches=st.integers(1, 300), world_size=st.integers(1, 300))
def test_division_gives_each_rank_a_part_of_the_order(num_microbatches, world_size):
    """The oracle is numpy's: np.array_split gives the first n % k of k parts one more."""
    division = Division(num_microbatches, min(world_size, num_microbatches))
    parts = [part.tolist() for part in np.array_split(np.arange(num_microbatches), division.world_size)]
    assert [list(division.of(rank)) for rank in range(division.world_size)] == parts
    assert division.most == max(map(len, parts))
    idle = sum(division.most - len(part) for part in parts)
    assert division.used_share == pytest.approx(1 - idle / (division.most * division.world_size))


@pytest.mark.parametrize(
    ("rank", "ranks_per_ghost", "expected"),
    [
        (0, 1, [0, 1, 2]),
        (3, 1, [9, 10, 11]),
        (0, 2, [0, 2, 4]),
        (1, 2, [1, 3, 5]),
        (2, 2, [6, 8, 10]),
        (3, 4, [3, 7, 11]),
    ],
)
def test_division_by_hand(rank, ranks_per_ghost, expected):
    """Four ranks of three microbatches each, as the global batch numbers them."""
    assert list(Division(12, 4, ranks_per_ghost).of(rank)) == expected


SPANNED: Batch = {"batch.bn_span": 128}
"""A ghost batch of two ranks' microbatches."""
MANY: Batch = {"batch.global_batch_size": 24576, "batch.microbatch_size": 256}


@pytest.mark.parametrize(
    ("changes", "world_size", "named", "remedy"),
    [
        # world_size 0: the config alone is refused
        ({"batch.bn_span": 7}, 0, "batch.microbatch_size=64", ": 4 is"),
        ({"batch.bn_span": 96}, 0, "batch.microbatch_size=64", ": 64 is"),
        # 96 is not a multiple of 64, but of 32, the largest multiple of bn_span that divides it
        ({"batch.global_batch_size": 96}, 0, "batch.microbatch_size=64", "batch.microbatch_size to 32"),
        # 100 is not a multiple of bn_span: no microbatch helps alone
        ({"batch.global_batch_size": 100}, 0, "to 64 or 128", "batch.microbatch_size and batch.bn_span to 25"),
        ({"batch.global_batch_size": 16}, 0, "to 64", "batch.microbatch_size and batch.bn_span to 16"),
        # batch norm of fewer than 8 images is not a remedy, nor of the ghost batch that two ranks share
        ({"batch.global_batch_size": 101}, 0, "", "set batch.global_batch_size to 64 or 128"),
        ({"batch.global_batch_size": 320, **SPANNED}, 0, "to 256 or 384", "batch.bn_span to 64"),
        ({"batch.virtual_ranks": 5}, 0, "batch.global_batch_size=256 ", ": 4 can"),  # 4 microbatches
        ({"batch.virtual_ranks": 3, **SPANNED}, 0, "batch.global_batch_size=256 ", ": 2 can"),
        ({"batch.virtual_ranks": 1, **SPANNED}, 0, "batch.global_batch_size=256 ", ": 2 can"),
        # 4 ghost batches of 4 ranks each
        ({"batch.virtual_ranks": 12, "batch.microbatch_size": 16, "batch.bn_span": 64}, 0, "", ": 8 can"),
        ({}, 8, "fewer than 8 ", ": set batch.microbatch_size to 32"),  # 256 / 8
        ({}, 5, "fewer than 5 ", ": set batch.microbatch_size to 32"),  # 2, 2, 2, 1, 1 of 8
        # 2 of 128 for most ranks, but 1 for a quarter of them; or of 96
        (MANY, 130, "fewer than 130 ", ": set batch.microbatch_size to 96"),
        # 16 samples a rank hold no ghost batch of 32: 16 x 64, or two ranks to a ghost batch
        ({}, 16, "set batch.global_batch_size to 1024", "batch.microbatch_size to 16"),
        ({}, 9, "fewer than 9 ", ": set batch.global_batch_size to 576"),  # 8 ghost batches, and 9 ranks form no groups
        # 3 ghost batches of two ranks each: their statistics are exchanged at the same places of all ranks' steps
        ({"batch.global_batch_size": 384, **SPANNED}, 4, "2 groups of 2 ranks", ": set batch.microbatch_size to 32"),
        (SPANNED, 1, "batch.bn_span=128 ", ": set batch.microbatch_size to 128"),  # one rank holds a ghost batch whole
        # 3 ghost batches: pairs of ranks share 1 or 3
        ({**SPANNED, "batch.global_batch_size": 384}, 5, "batch.bn_span=128 ", ": start 2 ranks"),
        ({**SPANNED, "batch.virtual_ranks": 4}, 1, "microbatch_size to 128", "batch.virtual_ranks to 2"),
        ({"batch.bn_span": 256, "batch.virtual_ranks": 4}, 2, "microbatch_size to 128", "batch.virtual_ranks to 2"),
        ({"batch.virtual_ranks": 2}, 4, " 4 ranks", ": leave it out, or start 2 ranks"),
    ],
)
def test_batch_refusal_names_its_remedy(changes, world_size, named, remedy):
    """What it names is legal: test_batch_remedies_are_all_legal follows it."""
    message = job_refusal(changes, world_size=world_size) if world_size else refusal(changes)
    assert message.startswith("batch.")
    assert re.search(naming(named, *(f"{key}={value}" for key, value in [*changes.items()][:1])), message)
    assert message.endswith(remedy)


@pytest.mark.parametrize(
    ("changes", "world_sizes"),
    [
        *(({"batch.bn_span": span}, ()) for span in (4, 64, 128, 256)),
        ({"batch.global_batch_size": 384, **SPANNED}, (2, 6)),
        ({"batch.virtual_ranks": 3}, (1, 2, 3)),
    ],
)
def test_batch_that_divides_is_legal(changes, world_sizes):
    batch = make_config(changes).batch
    assert all(accumulation_steps(batch, world_size=world_size) for world_size in world_sizes)


def followed(batch: Batch, world_size: int, message: str) -> tuple[Batch, int]:
    """The batch and the job after what the message advises."""
    if ranks := re.search(r"start (\d+) rank", message):
        return batch, int(ranks.group(1))
    advice = message.rpartition(": ")[2].split(", or")[0]
    if only := re.fullmatch(r"(\d+) (is|can)", advice):
        return batch | {
            "batch.bn_span" if only.group(2) == "is" else "batch.virtual_ranks": int(only.group(1))
        }, world_size
    changes = {key: int(value) for key, value in re.findall(r"(batch\.\w+) to (\d+)", advice)}
    assert changes, message
    return batch | changes, world_size


def legal_after_advice(batch: Batch, world_size: int) -> tuple[Batch, int]:
    """Until nothing is refused: first by the config alone, then by the job."""
    for _ in range(5):
        try:
            accumulation_steps(make_config(batch).batch, world_size=world_size)
        except ConfigError as error:
            batch, world_size = followed(batch, world_size, str(error))
        else:
            return batch, world_size
    pytest.fail(f"five remedies were not enough: {batch}, {world_size} ranks")


@given(
    span=st.integers(1, 24),
    microbatch_size=st.integers(1, 24),
    global_batch_size=st.integers(1, 4000),
    virtual_ranks=st.none() | st.integers(1, 60),
    world_size=st.integers(1, 40),
)
def test_batch_remedies_are_all_legal(span, microbatch_size, global_batch_size, virtual_ranks, world_size):
    """Followed, they lead to a config that both the constructor and the job accept."""
    batch: Batch = {
        "batch.global_batch_size": global_batch_size,
        "batch.bn_span": span,
        "batch.microbatch_size": microbatch_size,
        "batch.virtual_ranks": virtual_ranks,
    }
    try:
        accumulation_steps(make_config(batch).batch, world_size=world_size)
    except ConfigError as error:
        # the second remedy, without mixing of images: ranks share ghost batches, and the update stays the same
        second = re.search(r"or, without mixup and cutmix, (batch\.\w+) to (\d+)$", str(error))
        if second and virtual_ranks is None:
            shared = batch | {second.group(1): int(second.group(2))}
            assert accumulation_steps(make_config(shared).batch, world_size=world_size) >= 1
    batch, num_ranks = legal_after_advice(batch, world_size)
    division = divide_batch(make_config(batch).batch, world_size=num_ranks)
    assert division.num_microbatches * batch["batch.microbatch_size"] == batch["batch.global_batch_size"]
    assert len(division.of(num_ranks - 1)) >= 1
    if span % microbatch_size == 0 or microbatch_size % span == 0:
        assert batch["batch.bn_span"] == span
    if virtual_ranks is not None:
        assert batch["batch.virtual_ranks"] >= num_ranks
