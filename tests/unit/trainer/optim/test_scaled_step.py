"""LARS by the kernel of a GPU: its formula, and tables that are made again where tensors have moved."""

from pathlib import Path

import pytest
import torch
from forked_ranks import exit_codes, start_rank
from torch.utils._triton import has_triton_package

from bigbatch.trainer.optim import scaled_step
from bigbatch.trainer.optim.scaled_step import BLOCK, MOST_TABLES, ScaledStep, can_step


@pytest.mark.skipif(not has_triton_package(), reason="Triton is not installed")
def test_lars_on_the_interpreter_follows_its_formula(tmp_path: Path) -> None:
    log = tmp_path / "log"
    target = "interpreted_kernels:lars_by_its_formula"
    process = start_rank(target, [], environ={"TRITON_INTERPRET": "1"}, stdout=log, stderr=log)
    assert exit_codes([process], timeout_seconds=120) == [0], log.read_text()


def test_table_tells_where_tensors_lie_and_is_made_again_where_they_moved() -> None:
    step, weights = ScaledStep(), [torch.zeros(BLOCK + 1), torch.zeros(3)]
    grads = [[torch.zeros_like(w) for w in weights] for _ in range(MOST_TABLES + 1)]
    tables = [step._find_table(weights, each, []) for each in grads]
    assert step._find_table(weights, grads[-1], []) is tables[-1]
    addresses_RN, sizes_N, programs_2P = tables[0]
    assert addresses_RN.tolist() == [[t.data_ptr() for t in row] for row in (weights, grads[0])]
    assert sizes_N.tolist() == [BLOCK + 1, 3]
    assert programs_2P.tolist() == [[0, 0, 1], [0, BLOCK, 0]]
    assert len(step._tables) == MOST_TABLES


def test_kernel_is_for_fp32_on_a_gpu_alone() -> None:
    assert not can_step(torch.zeros(1))


@pytest.mark.gpu
def test_a_capture_makes_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, grads = [torch.zeros(3, device="cuda")], [torch.ones(3, device="cuda")]
    step = ScaledStep()
    assert can_step(weights[0])
    with monkeypatch.context() as patch:
        patch.setattr(scaled_step.torch.cuda, "is_current_stream_capturing", lambda: True)
        assert step._find_table(weights, grads, []) is None
    table = step._find_table(weights, grads, [])
    monkeypatch.setattr(scaled_step.torch.cuda, "is_current_stream_capturing", lambda: True)
    assert step._find_table(weights, grads, []) is table
    assert step._captured == [table]
