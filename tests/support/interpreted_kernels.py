"""Kernels by Triton's interpreter, in a process that has TRITON_INTERPRET=1 from its start: no GPU is needed."""

import torch
import torch.nn.functional as F
from torch import Tensor

from bigbatch.trainer.models.max_pool import register_operators


def _compare_pools(images_BCHW: Tensor) -> None:
    """Maxima, and where the gradients go: torch's. Up to four summands of a gradient are added in another order."""
    batch, channels, height, width = images_BCHW.shape
    grad_BCHW = torch.randn(batch, channels, height // 2, width // 2)
    found = []
    for pool in (torch.ops.bigbatch.max_pool3x3, lambda images: [F.max_pool2d(images, 3, 2, 1)]):
        given_BCHW = images_BCHW.clone(memory_format=torch.preserve_format).requires_grad_()
        pooled_BCHW = pool(given_BCHW)[0]
        found.append((pooled_BCHW, torch.autograd.grad(pooled_BCHW, given_BCHW, grad_BCHW)[0]))
    (ours_BCHW, our_grad_BCHW), (pooled_BCHW, want_BCHW) = found
    torch.testing.assert_close(ours_BCHW, pooled_BCHW, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(our_grad_BCHW, want_BCHW, rtol=0, atol=4 * torch.finfo().eps * 4)
    assert ours_BCHW.is_contiguous(memory_format=torch.channels_last)


def pool_like_torch() -> int:
    """The max-pool, with equal maxima, sizes that fill no program, NaN and -inf."""
    register_operators()
    torch.manual_seed(0)
    for shape in ((2, 8, 12, 16), (1, 3, 2, 2), (3, 5, 6, 4)):  # the last two fill no program
        images_BCHW = torch.randn(shape).mul(4).round().contiguous(memory_format=torch.channels_last)
        _compare_pools(images_BCHW)
    images_BCHW[0, 0, 1, 1], images_BCHW[1] = float("nan"), float("-inf")
    _compare_pools(images_BCHW)
    return 0
