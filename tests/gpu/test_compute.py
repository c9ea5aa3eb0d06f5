"""Compiled regions and recomputed blocks on a GPU."""

import gc
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bigbatch.trainer.models import build_model
from bigbatch.trainer.models.norm import GhostBatchNorm2d, MicrobatchStatistics, flatten_running_statistics
from bigbatch.trainer.models.regions import compile_regions_, recompute_
from bigbatch.trainer.step.precision import COMPUTE_DTYPES, to_half_

pytestmark = pytest.mark.gpu
COUNT, SIZE, LARGE = 32, 64, 192


@pytest.fixture(autouse=True)
def as_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch TF32 off, as training in fp32 does, and the search for kernels, which takes memory of its own."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


def make(precision: str, *, dtype: torch.dtype | None = None) -> nn.Module:
    """dtype: of all arithmetic, with the same rounded weights; running statistics are left out then."""
    torch.manual_seed(0)
    norm = partial(GhostBatchNorm2d, bn_span=COUNT // 2, ghosts_per_step=2)
    model = build_model("resnet50", num_classes=10, norm=norm, zero_init_residual=False)
    for name, parameter in model.named_parameters():
        if name.endswith("bn3.weight"):  # of a whole branch each: with 1, what rounds in the first block grows 1e5-fold
            nn.init.constant_(parameter, 0.2)
    model.to(device="cuda", memory_format=torch.channels_last)  # type: ignore[call-overload]
    to_half_(model, COMPUTE_DTYPES[precision])
    if dtype is not None:
        return model.to(dtype)
    statistics_N = flatten_running_statistics(model)
    MicrobatchStatistics(model, statistics_N, take=statistics_N.lerp_)
    return model


def step(model: nn.Module, precision: str) -> tuple[float, Tensor]:
    """Loss, and all gradients in float64."""
    loss = backward(model, precision)
    return loss, torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


def backward(model: nn.Module, precision: str, *, size: int = SIZE) -> float:
    images = torch.randn(COUNT, 3, size, size, generator=torch.Generator().manual_seed(1))
    images = images.to("cuda", COMPUTE_DTYPES[precision], memory_format=torch.channels_last)
    images_BCHW = images.to(next(model.parameters()).dtype)
    labels_B = (torch.arange(COUNT) % 10).cuda()
    for parameter in model.parameters():
        parameter.grad = None
    logits_BK = model(images_BCHW)
    loss = F.cross_entropy(logits_BK.to(torch.promote_types(logits_BK.dtype, torch.float32)), labels_B)
    loss.backward()
    return float(loss.detach())


@pytest.mark.long
@pytest.mark.parametrize(("precision", "eps"), [("fp32", 2**-11), ("bf16", 2**-8), ("fp16", 2**-11)])
def test_compiled_step_is_as_close_to_the_truth_as_the_eager_one(precision: str, eps: float) -> None:
    """The truth: the same rounded weights and images in float64. 50 layers multiply what each rounds.

    In a net of few layers the signs of a few ReLUs would decide. Recomputed blocks run what is compiled already.
    """
    _, truth_N = step(make(precision, dtype=torch.float64), precision)
    eager_loss, eager_N = step(make(precision), precision)
    model = make(precision)
    compile_regions_(model, mode=None)
    for num_recomputed in (0, 4):
        recompute_(model, num_recomputed)
        loss, compiled_N = step(model, precision)
        assert loss == pytest.approx(eager_loss, rel=16 * eps), num_recomputed
        assert (compiled_N - truth_N).norm() < 2 * (eager_N - truth_N).norm(), num_recomputed


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_recomputed_blocks_need_less_memory(precision: str) -> None:
    """By the sizes of their tensors these steps take 2,025, 1,496 and 1,015 MB at most in fp32, half in bf16 and fp16.

    The peak is at the end of forward. With all 16 blocks it is in backward, beside gradients, and hardly lower: 940 MB.
    """
    losses, peaks = [], []
    for count in (0, 3, 8):
        model = make(precision)
        recompute_(model, count)
        backward(model, precision, size=LARGE)  # what CUDA's libraries keep is there from now on
        model.zero_grad()
        gc.collect()  # the last model, whose blocks refer to themselves
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        losses.append(backward(model, precision, size=LARGE))
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del model
    assert losses[1:] == pytest.approx(losses[:1] * 2, rel=1e-3)
    assert peaks[1] < 0.85 * peaks[0], peaks
    assert peaks[2] < 0.85 * peaks[1], peaks
