"""Running statistics of a step, against their closed form in float64."""

from itertools import permutations

import pytest
import torch
from torch import Tensor

from bigbatch.trainer.step.reproducible import GridStatistics
from bigbatch.trainer.step.statistics import StepStatistics

MOMENTUM = 0.1
STARTS = torch.tensor([0.5, -2.0, 3.0])


def make_statistics(microbatches: int, *, kind: type[StepStatistics] = GridStatistics) -> StepStatistics:
    return kind(STARTS.clone(), microbatches=microbatches)


def moved(statistics: StepStatistics, gathered: tuple[Tensor, ...], *, num_failed: int = 0) -> Tensor:
    """Return the running statistics after one step of as many ranks as there are terms."""
    for each_N in gathered:
        statistics.take_(each_N, MOMENTUM)
    statistics.to_sum_N[-1] = num_failed  # as the sum over ranks brings it
    is_skipped_1 = statistics.average_()
    assert bool(is_skipped_1) == (num_failed > 0)
    return statistics.running_N.clone()


GATHERED = tuple(torch.randn(3, generator=torch.Generator().manual_seed(seed)) for seed in range(4))


@pytest.mark.parametrize("kind", [StepStatistics, GridStatistics])
def test_statistics_move_by_the_mean_over_all_microbatches(kind: type[StepStatistics]) -> None:
    statistics = make_statistics(4, kind=kind)
    expected = STARTS.double()
    for _ in range(2):  # the second step begins new sums
        expected = (1 - MOMENTUM) * expected + MOMENTUM * torch.stack(GATHERED).double().mean(0)
        assert moved(statistics, GATHERED).tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_statistics_on_a_grid_have_the_same_bits_in_any_order() -> None:
    found = [moved(make_statistics(4), order) for order in permutations(GATHERED)]
    assert all(torch.equal(each, found[0]) for each in found)


def test_statistics_beyond_the_grid_are_counted() -> None:
    statistics = make_statistics(2)
    moved(statistics, (torch.tensor([1.0, 1e30, 2.0]), torch.tensor([0.0, 1.0, float("nan")])))
    assert statistics.take_beyond() == 2
    assert statistics.take_beyond() == 0
    moved(statistics, (torch.tensor([1e30] * 3),), num_failed=1)  # such a step does not count
    assert statistics.take_beyond() == 0


@pytest.mark.parametrize("kind", [StepStatistics, GridStatistics])
def test_statistics_stay_where_a_rank_had_no_batch(kind: type[StepStatistics]) -> None:
    statistics = make_statistics(1, kind=kind)
    assert torch.equal(moved(statistics, (torch.full((3,), torch.nan),), num_failed=1), STARTS)
    assert not torch.equal(moved(statistics, (torch.ones(3),)), STARTS), "the next step continues"
