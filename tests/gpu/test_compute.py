"""Compiled regions and recomputed blocks on a GPU."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.trainer.models import build_model
from bigbatch.trainer.models.norm import GhostBatchNorm2d, MicrobatchStatistics, flatten_running_statistics
from bigbatch.trainer.models.regions import compile_regions_, recompute_
from bigbatch.trainer.precision import COMPUTE_DTYPES, to_half_

pytestmark = pytest.mark.gpu
COUNT, SIZE = 32, 64


def make(precision: str) -> nn.Module:
    torch.manual_seed(0)
    norm = partial(GhostBatchNorm2d, bn_span=COUNT // 2, ghosts_per_step=2)
    model = build_model("resnet50", num_classes=10, norm=norm, zero_init_residual=False)
    model.to(device="cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]
    to_half_(model, COMPUTE_DTYPES[precision])
    MicrobatchStatistics(model, flatten_running_statistics(model), microbatches_per_step=1)
    return model


def step(model: nn.Module, precision: str) -> tuple[float, Tensor]:
    """Loss, and all gradients."""
    images = torch.randn(COUNT, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(1))
    images_BCHW = images.to("cuda", COMPUTE_DTYPES[precision], memory_format=torch.channels_last)
    labels_B = (torch.arange(COUNT) % 10).cuda()
    for parameter in model.parameters():
        parameter.grad = None
    loss = F.cross_entropy(model(images_BCHW).float(), labels_B)
    loss.backward()
    return float(loss), torch.cat([p.grad.float().flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "eps"), [("fp32", 2**-11), ("bf16", 2**-8), ("fp16", 2**-11)])
@pytest.mark.parametrize("num_recomputed", [0, 4])
def test_a_compiled_step_is_the_eager_one(precision: str, eps: float, num_recomputed: int) -> None:
    """Up to some roundings of 50 layers; fp32 convolutions may round to tf32."""
    model = make(precision)
    compile_regions_(model, mode=None)
    recompute_(model, num_recomputed)
    loss, grads_N = step(model, precision)
    want_loss, want_N = step(make(precision), precision)
    assert loss == pytest.approx(want_loss, rel=16 * eps)
    assert float((grads_N - want_N).norm() / want_N.norm()) < 128 * eps


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_recomputed_blocks_need_less_memory(precision: str) -> None:
    losses, peaks = [], []
    for count in (0, 8, 16):
        model = make(precision)
        recompute_(model, count)
        step(model, precision)
        torch.cuda.reset_peak_memory_stats()
        losses.append(step(model, precision)[0])
        peaks.append(torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated())
        del model
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-3)
    assert peaks[0] > peaks[1] > peaks[2]
