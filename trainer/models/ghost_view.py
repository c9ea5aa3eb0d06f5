"""Batch norm of all ghost batches of a microbatch as one view, for torch's compiler (docs/decisions/144)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class NormalizeGhostView(torch.autograd.Function):
    """Normalises a microbatch as a view (ghosts, images, channels, height, width), and applies ReLU if has_relu.

    For a compiler, which makes one set of kernels of it for any number of ghost batches: eager, it makes more passes
    over memory than torch's kernel. Only the images are kept for backward, which computes the ReLU's mask from them.
    """

    @staticmethod
    def forward(
        ctx: Any, images_BCHW: Tensor, weight_C: Tensor, bias_C: Tensor, num_ghosts: int, eps: float, has_relu: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the result in the dtype of the images, and mean and biased variance (G, C) in that of the weight."""
        ghosts = images_BCHW.unflatten(0, (num_ghosts, -1)).to(weight_C.dtype)
        var_G1C11, mean_G1C11 = torch.var_mean(ghosts, dim=(1, 3, 4), correction=0, keepdim=True)
        inverse_G1C11 = torch.rsqrt(var_G1C11 + eps)
        result = _scale((ghosts - mean_G1C11) * inverse_G1C11, weight_C, bias_C)
        result = torch.relu(result) if has_relu else result
        ctx.save_for_backward(images_BCHW, weight_C, bias_C, mean_G1C11, inverse_G1C11)
        ctx.has_relu = has_relu
        mean_GC, var_GC = mean_G1C11.flatten(1), var_G1C11.flatten(1)
        ctx.mark_non_differentiable(mean_GC, var_GC)
        return result.to(images_BCHW.dtype).flatten(0, 1), mean_GC, var_GC

    @staticmethod
    def backward(ctx: Any, grad_BCHW: Tensor, *_moments: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of images, weight and bias (Ioffe and Szegedy 2015, section 3)."""
        images_BCHW, weight_C, bias_C, mean_G1C11, inverse_G1C11 = ctx.saved_tensors
        num_ghosts = len(mean_G1C11)
        ghosts, grad = (t.unflatten(0, (num_ghosts, -1)).to(weight_C.dtype) for t in (images_BCHW, grad_BCHW))
        unit = (ghosts - mean_G1C11) * inverse_G1C11
        if ctx.has_relu:
            grad = torch.where(_scale(unit, weight_C, bias_C) <= 0, 0, grad)
        sum_G1C11, unit_sum_G1C11 = (t.sum((1, 3, 4), keepdim=True) for t in (grad, grad * unit))
        count = ghosts[0].numel() // len(weight_C)
        pull = sum_G1C11 / count + unit * (unit_sum_G1C11 / count)
        images_grad = (grad - pull) * (inverse_G1C11 * weight_C[:, None, None])
        sums = (unit_sum_G1C11, sum_G1C11)
        # stacked: one kernel sums both over the ghost batches, of which a single one needs none
        affine_grads_C = torch.stack(sums).flatten(2).sum(1) if num_ghosts > 1 else [t.flatten() for t in sums]
        return images_grad.to(images_BCHW.dtype).flatten(0, 1), *affine_grads_C, None, None, None


def _scale(unit: Tensor, weight_C: Tensor, bias_C: Tensor) -> Tensor:
    return unit * weight_C[:, None, None] + bias_C[:, None, None]


def normalize_view(
    images_BCHW: Tensor,
    running_mean_C: Any,
    running_var_C: Any,
    *,
    weight_C: Tensor,
    bias_C: Tensor,
    momenta: Sequence[float],
    eps: float,
    has_relu: bool,
) -> Tensor:
    """Normalise len(momenta) ghost batches, and update the running statistics with each in turn, in place.

    Returns a tensor like images_BCHW, with ReLU applied if has_relu. A ghost batch has at least two images.
    """
    normalized_BCHW: Tensor
    normalized_BCHW, mean_GC, var_GC = NormalizeGhostView.apply(
        images_BCHW, weight_C, bias_C, len(momenta), eps, has_relu
    )
    count = images_BCHW[:, 0].numel() // len(momenta)
    for running_C, moments_GC in ((running_mean_C, mean_GC), (running_var_C, var_GC * (count / (count - 1)))):
        updated_C = running_C
        for momentum, moment_C in zip(momenta, moments_GC, strict=True):
            updated_C = momentum * moment_C + (1 - momentum) * updated_C
        running_C.copy_(updated_C)
    return normalized_BCHW
