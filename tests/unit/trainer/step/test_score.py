"""Sums of own metrics."""

import pytest
import torch

from bigbatch.trainer.step.score import Metric

TINY = 2.0**-53
"""Half of the step of float64 above 1: two of them count, one at a time is lost."""


@pytest.mark.parametrize("is_on_grid", [False, True])
def test_metric_on_the_grid_has_one_sum_in_any_order(is_on_grid: bool) -> None:
    metric = Metric(lambda logits_BK, labels_B: logits_BK[:, 0], width=1, is_on_grid=is_on_grid)

    def total(*batches: list[float]) -> float:
        sums_1 = torch.zeros(1, dtype=torch.float64)
        for values in batches:
            logits_BK = torch.tensor(values, dtype=torch.float64)[:, None]
            kept = logits_BK.clone()
            count = len(values)
            sums_1 += metric.sums(logits_BK, torch.zeros(count).long(), torch.ones(count, dtype=torch.bool))
            assert torch.equal(logits_BK, kept)
        return float(sums_1)

    assert total([1.0], [TINY], [TINY]) == 1.0
    assert total([TINY, TINY], [1.0]) == (1.0 if is_on_grid else 1.0 + 2 * TINY)
    assert total([0.25, 3.0], [-2.5]) == 0.75
