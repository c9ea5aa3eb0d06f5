"""Which rank does what: shares by cost against bounds that hold for any order, and every element in one place."""

import random

import pytest
import torch

from bigbatch.comm.connect import connect
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.trainer.optim.divided_work import DividedWork, gathered_elements, share_out


def test_share_out_gives_the_most_expensive_to_the_rank_with_least_work() -> None:
    shares = share_out([1.0, 5.0, 4.0, 2.0], [10, 50, 40, 20], world_size=2)
    assert shares.owners == (0, 0, 1, 1)
    assert shares.offsets == (50, 0, 0, 40)
    assert shares.part == 60


@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 100])
def test_share_out_balances_and_overlaps_nothing(world_size: int) -> None:
    draw = random.Random(world_size)
    sizes = [draw.randint(1, 1000) for _ in range(40)]
    costs = [size * draw.random() for size in sizes]
    shares = share_out(costs, sizes, world_size=world_size)
    loads, taken = [0.0] * world_size, [set[int]() for _ in range(world_size)]
    for owner, offset, size, cost in zip(shares.owners, shares.offsets, sizes, costs, strict=True):
        loads[owner] += cost
        elements = set(range(offset, offset + size))
        assert not elements & taken[owner]
        taken[owner] |= elements
    assert max(map(max, filter(None, taken))) + 1 == shares.part
    # Graham's bound for any list of tasks, whatever the best possible is
    assert max(loads) <= sum(costs) / world_size + (1 - 1 / world_size) * max(costs) + 1e-9


@pytest.mark.parametrize(
    ("sizes", "world_size", "expected"),
    [([8, 8], 2, 16), ([12, 4], 2, 24), ([10, 2, 2], 3, 0), ([10], 2, 20), ([10], 3, 0), ([10], 1, 0), ([], 2, 0)],
)
def test_what_is_gathered_is_at_most_twice_what_there_is(sizes: list[int], world_size: int, expected: int) -> None:
    """A rank's part is as long as the longest: of 10, 2 and 2 on three, 30 elements for 14, more than twice as many."""
    shares = share_out([float(size) for size in sizes], sizes, world_size=world_size)
    assert gathered_elements(shares, sizes, world_size=world_size) == expected


@pytest.mark.parametrize(("one_by_one", "expected"), [(False, [3]), (True, [1, 1, 1])])
def test_divided_work_alone_does_all(one_by_one: bool, expected: list[int]) -> None:
    calls: list[int] = []

    def work(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        calls.append(len(tensors))
        return [2 * tensor for tensor in tensors]

    with connect(env=ALONE) as communicator:
        tensors = [torch.full((2, 2), float(i)) for i in range(3)]
        divided = DividedWork(communicator, one_by_one=one_by_one)
        found = divided(tensors, work, costs=[1.0] * 3, dtype=torch.float32)()
    assert [float(t.mean()) for t in found] == [0.0, 2.0, 4.0]
    assert calls == expected
