"""The launches of today's LARS that a prototype states."""

import pytest
import torch
from optimizer_steps import Launches
from torch.utils._triton import has_triton_package

from bigbatch.trainer.optim import lars
from bigbatch.trainer.optim.fused import scaled_on_gpu

NORM_KERNELS = 3
"""Launches of torch._foreach_norm on a GPU: zeros, sums of chunks, norms."""


@pytest.mark.skipif(not has_triton_package(), reason="Triton is not installed")
def test_table_refuses_weights_with_gaps_and_gradients_that_moved() -> None:
    from benchmarks.gpu.prototypes.lars_table import LarsTable, Trained

    def trained(weight: torch.Tensor) -> Trained:
        half = torch.empty_strided(weight.shape, weight.stride(), dtype=torch.bfloat16)
        return Trained(weight=weight, momentum=weight, grad=half, half=half, weight_decay=0.0, adapts=True)

    for gap in (torch.zeros(4, 8)[:, :4], torch.zeros(1, 8).expand(4, 8)):
        with pytest.raises(AssertionError, match="gaps"):
            LarsTable([trained(gap)])
    dense = trained(torch.zeros(2, 3, 4, 4).to(memory_format=torch.channels_last))
    with pytest.raises(AssertionError, match="moved"):
        LarsTable([dense]).step_([dense.grad.clone()], torch.ones(3))


@pytest.mark.slow
@pytest.mark.skipif(not has_triton_package(), reason="Triton is not installed")
def test_update_of_today_has_the_stated_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu.prototypes.lars_table import TODAY_LAUNCHES, comparison_of

    monkeypatch.setattr(lars.LARS, "_update_on_cpu_", lars.LARS._update_at_once_)
    monkeypatch.setattr(lars, "scaled", scaled_on_gpu)
    today = comparison_of(torch.device("cpu"), is_small=True).today
    today()
    with Launches() as seen:
        today()
    # one kernel copies all tensors to another dtype, and the comparison makes the flag that a step has
    copies = {"_foreach_copy_", "eq", "select"}
    counted = [name for name in seen.names if name not in copies]
    assert len(counted) + 2 + NORM_KERNELS - 1 == TODAY_LAUNCHES
