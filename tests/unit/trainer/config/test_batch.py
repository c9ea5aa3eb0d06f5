"""Which batches, ghost batches and ranks go together, and that each remedy named is legal."""

import re

import numpy as np
import pytest
from error_texts import naming
from hypothesis import given
from hypothesis import strategies as st

from bigbatch.errors import ConfigError
from bigbatch.trainer.config.batch import Division, accumulation_steps, divide_batch
from tests.unit.trainer.config.test_schema import make_config, refusal

Batch = dict[str, int | None]


def job_refusal(changes: Batch, *, world_size: int) -> str:
    """Return the error of a job of so many ranks for a config that is legal by itself."""
    with pytest.raises(ConfigError) as caught:
        accumulation_steps(make_config(changes).batch, world_size=world_size)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bn_span_names_a_legal_one():
    message = refusal({"batch.bn_span": 7})
    assert message.startswith("batch.bn_span=7 ")
    assert message.endswith(" batch.microbatch_size=64: 4 is")
    assert refusal({"batch.bn_span": 96}).endswith(" batch.microbatch_size=64: 64 is")
    for legal in (4, 64, 128, 256):
        make_config({"batch.bn_span": legal})


def test_global_batch_size_names_a_microbatch():
    """96 is not a multiple of 64, but of 32, the largest multiple of bn_span that divides it."""
    message = refusal({"batch.global_batch_size": 96})
    assert re.search(naming("batch.global_batch_size=96 ", "batch.microbatch_size=64: "), message)
    assert message.endswith("batch.microbatch_size to 32")
    # 100 is not a multiple of bn_span: no microbatch helps alone
    for size, others, together in ((100, "64 or 128", 25), (16, "64", 16)):
        message = refusal({"batch.global_batch_size": size})
        assert message.endswith(f"to {others}, or batch.microbatch_size and batch.bn_span to {together}")
        make_config({"batch.global_batch_size": size, "batch.microbatch_size": together, "batch.bn_span": together})
    # batch norm of fewer than 8 images is not a remedy
    assert refusal({"batch.global_batch_size": 101}).endswith("set batch.global_batch_size to 64 or 128")
    # nor of the ghost batch that two ranks share
    assert refusal({"batch.global_batch_size": 320, "batch.bn_span": 128}).endswith(
        "set batch.global_batch_size to 256 or 384, or batch.bn_span to 64"
    )


@pytest.mark.parametrize(("world_size", "expected"), [(1, 4), (2, 2), (3, 2), (4, 1)])
def test_accumulation_steps(world_size, expected):
    assert accumulation_steps(make_config().batch, world_size=world_size) == expected
    replay = make_config({"batch.virtual_ranks": 4}).batch
    assert accumulation_steps(replay, world_size=world_size) == expected


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


@pytest.mark.parametrize(
    ("batch", "world_size", "remedy"),
    [
        ({}, 8, "set batch.microbatch_size to 32"),  # 256 / 8
        ({}, 5, "set batch.microbatch_size to 32"),  # 2, 2, 2, 1, 1 of 8
        # 2 of 128 for most ranks, but 1 for a quarter of them; or of 96
        ({"batch.global_batch_size": 24576, "batch.microbatch_size": 256}, 130, "set batch.microbatch_size to 96"),
        # 16 samples a rank hold no ghost batch of 32: 16 x 64, or two ranks to a ghost batch
        ({}, 16, "set batch.global_batch_size to 1024, or, without mixup and cutmix, batch.microbatch_size to 16"),
        ({}, 9, "set batch.global_batch_size to 576"),  # 8 ghost batches, and 9 ranks form no groups
    ],
)
def test_more_ranks_than_microbatches_get_a_remedy(batch, world_size, remedy):
    message = job_refusal(batch, world_size=world_size)
    assert re.search(naming("batch.global_batch_size=", "batch.microbatch_size=", f"fewer than {world_size} "), message)
    assert message.endswith(f": {remedy}")


def test_groups_of_ranks_need_equal_shares():
    """3 ghost batches of two ranks each: their statistics are exchanged at the same places of all ranks' steps."""
    batch: Batch = {"batch.bn_span": 128, "batch.global_batch_size": 384}
    message = job_refusal(batch, world_size=4)
    assert re.search(naming("batch.global_batch_size=384 ", "3 ghost batches", "2 groups of 2 ranks"), message)
    assert message.endswith(": set batch.microbatch_size to 32")  # 4 ranks for each ghost batch
    for world_size in (2, 6):
        accumulation_steps(make_config(batch).batch, world_size=world_size)


@pytest.mark.parametrize(
    ("changes", "world_size", "remedy"),
    [
        ({}, 1, "set batch.microbatch_size to 128"),  # the one rank holds a ghost batch whole
        ({"batch.global_batch_size": 384}, 5, "start 2 ranks"),  # 3 ghost batches: pairs of ranks share 1 or 3
        ({"batch.virtual_ranks": 4}, 1, "set batch.microbatch_size to 128 and batch.virtual_ranks to 2"),
        ({"batch.bn_span": 256, "batch.virtual_ranks": 4}, 2, "set batch.microbatch_size to 128 and "
         "batch.virtual_ranks to 2"),
    ],
)  # fmt: skip
def test_accumulation_steps_of_ranks_that_form_no_groups_get_a_remedy(changes, world_size, remedy):
    changes = {"batch.bn_span": 128, **changes}
    message = job_refusal(changes, world_size=world_size)
    span = changes["batch.bn_span"]
    named = (f"batch.bn_span={span} ", f" {span // 64} ranks", "batch.microbatch_size=64", f" {world_size} rank")
    assert re.search(naming(*named), message)
    assert message.endswith(f": {remedy}")


@pytest.mark.parametrize(
    ("changes", "virtual_ranks", "fitting"),
    [
        ({}, 5, 4),  # 4 microbatches
        ({"batch.bn_span": 128}, 3, 2),
        ({"batch.bn_span": 128}, 1, 2),
        ({"batch.microbatch_size": 16, "batch.bn_span": 64}, 12, 8),  # 4 ghost batches of 4 ranks each
    ],
)
def test_virtual_ranks_share_the_global_batch(changes, virtual_ranks, fitting):
    message = refusal({**changes, "batch.virtual_ranks": virtual_ranks})
    assert re.search(naming(f"batch.virtual_ranks={virtual_ranks} ", "batch.global_batch_size=256 "), message)
    assert message.endswith(f": {fitting} can")
    make_config({**changes, "batch.virtual_ranks": fitting})


def test_virtual_ranks_are_as_many_as_those_of_the_job_or_more():
    message = job_refusal({"batch.virtual_ranks": 2}, world_size=4)
    assert re.search(naming("batch.virtual_ranks=2 ", " 4 ranks"), message)
    assert message.endswith(": leave it out, or start 2 ranks")
    for world_size in (1, 2, 3):
        accumulation_steps(make_config({"batch.virtual_ranks": 3}).batch, world_size=world_size)


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
