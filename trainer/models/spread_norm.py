"""Batch norm of a ghost batch that spans several ranks: one gather in forward, one in backward.

Every rank of the group has as many samples. Moments are put together as Chan et al. 1979 do it (from each rank's own
mean and variance, not from sums of squares, which cancel), in the dtype of the weights, by all ranks alike: so they
hold the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PIXELS = (0, 2, 3)


@dataclass(frozen=True)
class RankGroup:
    """Ranks that share each ghost batch. gather is collective: (N) of each -> (num_ranks, N)."""

    num_ranks: int
    gather: Callable[[Tensor], Tensor]


def moments(
    images_BCHW: Tensor, group: RankGroup, *, running_mean_C: Tensor, running_var_C: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute mean and 1 / standard deviation (C each) of the group's samples; move the running ones. Collective."""
    if images_BCHW.is_cuda:
        mean_C, inverse_C = torch.batch_norm_stats(images_BCHW, eps)
        mean_RC, inverse_RC = group.gather(torch.cat([mean_C, inverse_C])).chunk(2, dim=1)
        counts_R = mean_C.new_full((group.num_ranks,), images_BCHW.numel() / len(mean_C))
        combined: tuple[Tensor, Tensor] = torch.batch_norm_gather_stats_with_counts(
            images_BCHW, mean_RC, inverse_RC, running_mean_C, running_var_C, momentum, eps, counts_R
        )
        return combined
    var_C, mean_C = torch.var_mean(images_BCHW.to(running_mean_C.dtype), PIXELS, correction=0)
    mean_RC, var_RC = group.gather(torch.cat([mean_C, var_C])).chunk(2, dim=1)
    mean_C = mean_RC.mean(0)
    # variance within the ranks, and that between their means; equal counts make both plain means
    var_C = var_RC.mean(0) + (mean_RC - mean_C).square().mean(0)
    count = group.num_ranks * images_BCHW.numel() / len(mean_C)
    running_mean_C.lerp_(mean_C, momentum)
    # the running variance is the unbiased one, as torch's batch norm keeps it
    running_var_C.lerp_(var_C * (count / (count - 1)), momentum)
    return mean_C, (var_C + eps).rsqrt()


class SpreadNormalize(torch.autograd.Function):
    """Normalises by moments of the whole group, and in backward lets the gradient through them, too."""

    @staticmethod
    def forward(
        ctx: Any,
        images_BCHW: Tensor,
        weight_C: Tensor,
        bias_C: Tensor,
        mean_C: Tensor,
        inverse_C: Tensor,
        group: RankGroup,
    ) -> Tensor:
        """Compute weight * (images - mean) * inverse + bias, in the dtype of images."""
        ctx.save_for_backward(images_BCHW, weight_C, mean_C, inverse_C)
        ctx.group = group
        if images_BCHW.is_cuda:
            normalized: Tensor = torch.batch_norm_elemt(images_BCHW, weight_C, bias_C, mean_C, inverse_C, 0.0)
            return normalized
        variance_C = inverse_C.pow(-2)  # holds epsilon already; torch 2.10's F.batch_norm refuses to add none
        return torch.batch_norm(
            images_BCHW, weight_C, bias_C, mean_C, variance_C, False, 0.0, 0.0, torch.backends.cudnn.enabled
        )

    @staticmethod
    def backward(ctx: Any, grad_BCHW: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of images, and of this rank's share of weight and bias. Collective over the group."""
        images_BCHW, weight_C, mean_C, inverse_C = ctx.saved_tensors
        group: RankGroup = ctx.group
        reduce, apply = (_reduce_gpu, _apply_gpu) if images_BCHW.is_cuda else (_reduce_cpu, _apply_cpu)
        grad_BCHW = grad_BCHW.contiguous(memory_format=_memory_format(images_BCHW))
        sums_2C = reduce(grad_BCHW, images_BCHW, mean_C, inverse_C)
        # this rank's share alone: the reducer sums gradients of weights over all ranks anyway
        grad_bias_C, grad_weight_C = sums_2C[0], sums_2C[1] * inverse_C
        total_2C = group.gather(sums_2C.view(-1)).sum(0).view_as(sums_2C)
        grad_images_BCHW = apply(
            grad_BCHW, images_BCHW, mean_C, inverse_C, weight_C, total_2C, num_ranks=group.num_ranks
        )
        return grad_images_BCHW, grad_weight_C, grad_bias_C, None, None, None


def _memory_format(images_BCHW: Tensor) -> torch.memory_format:
    is_last = images_BCHW.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if is_last else torch.contiguous_format


def _reduce_gpu(grad_BCHW: Tensor, images_BCHW: Tensor, mean_C: Tensor, inverse_C: Tensor) -> Tensor:
    """Compute this rank's sums of the gradient, and of the gradient times (images - mean), stacked."""
    sum_C, product_C, *_ = torch.batch_norm_backward_reduce(
        grad_BCHW, images_BCHW, mean_C, inverse_C, None, True, False, False
    )
    return torch.stack([sum_C, product_C])


def _reduce_cpu(grad_BCHW: Tensor, images_BCHW: Tensor, mean_C: Tensor, inverse_C: Tensor) -> Tensor:
    grad_BCHW = grad_BCHW.to(mean_C.dtype)
    centred_BCHW = images_BCHW - mean_C[:, None, None]
    return torch.stack([grad_BCHW.sum(PIXELS), (grad_BCHW * centred_BCHW).sum(PIXELS)])


def _apply_gpu(
    grad_BCHW: Tensor,
    images_BCHW: Tensor,
    mean_C: Tensor,
    inverse_C: Tensor,
    weight_C: Tensor,
    total_2C: Tensor,
    *,
    num_ranks: int,
) -> Tensor:
    """Compute the gradient of images from the sums of the whole group."""
    count = images_BCHW.numel() // len(mean_C)
    counts_R = torch.full((num_ranks,), count, dtype=torch.int32, device=images_BCHW.device)
    grad_images_BCHW: Tensor = torch.batch_norm_backward_elemt(
        grad_BCHW, images_BCHW, mean_C, inverse_C, weight_C, total_2C[0], total_2C[1], counts_R
    )
    return grad_images_BCHW


def _apply_cpu(
    grad_BCHW: Tensor,
    images_BCHW: Tensor,
    mean_C: Tensor,
    inverse_C: Tensor,
    weight_C: Tensor,
    total_2C: Tensor,
    *,
    num_ranks: int,
) -> Tensor:
    count = num_ranks * images_BCHW.numel() / len(mean_C)
    # what moves with the mean, and with the variance, is taken out of the gradient
    mean_grad_C, slope_C = total_2C[0] / count, total_2C[1] / count * inverse_C.square()
    centred_BCHW = images_BCHW - mean_C[:, None, None]
    pulled_BCHW = grad_BCHW - mean_grad_C[:, None, None] - centred_BCHW * slope_C[:, None, None]
    return (pulled_BCHW * (weight_C * inverse_C)[:, None, None]).to(images_BCHW.dtype)
