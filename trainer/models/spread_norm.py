"""Batch norm of a ghost batch that spans several ranks: one gather in forward, one in backward.

Every rank of the group has the same number of samples. All ranks combine the moments in the same way, as Chan et al.
1979 do (from each rank's own mean and variance, not from sums of squares, which cancel), in the dtype of the weights:
so they hold the same bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

PIXELS = (0, 2, 3)


@dataclass(frozen=True)
class RankGroup:
    """Ranks that share each ghost batch. gather is collective: (N) on each rank -> (num_ranks, N)."""

    num_ranks: int
    gather: Callable[[Tensor], Tensor]

    def normalize(
        self,
        images_BCHW: Tensor,
        weight_C: Tensor,
        bias_C: Tensor,
        *,
        running_mean_C: Tensor,
        running_var_C: Tensor,
        momentum: float,
        eps: float,
    ) -> Tensor:
        """Normalise by moments of the group's samples; update the running ones. Collective, as is its backward."""
        with torch.no_grad():  # SpreadNormalize itself computes the gradient through the moments
            mean_C, inverse_C = moments(
                images_BCHW,
                self,
                running_mean_C=running_mean_C,
                running_var_C=running_var_C,
                momentum=momentum,
                eps=eps,
            )
        normalized: Tensor = SpreadNormalize.apply(images_BCHW, weight_C, bias_C, mean_C, inverse_C, self)
        return normalized


def moments(
    images_BCHW: Tensor, group: RankGroup, *, running_mean_C: Tensor, running_var_C: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Return mean and 1 / standard deviation (C each) of the group's samples; update the running ones. Collective."""
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
    # variance within the ranks plus variance between their means; equal counts make both plain means
    var_C = var_RC.mean(0) + (mean_RC - mean_C).square().mean(0)
    count = group.num_ranks * images_BCHW.numel() / len(mean_C)
    running_mean_C.lerp_(mean_C, momentum)
    # the running variance is the unbiased one, as torch's batch norm keeps it
    running_var_C.lerp_(var_C * (count / (count - 1)), momentum)
    return mean_C, (var_C + eps).rsqrt()


class SpreadNormalize(torch.autograd.Function):
    """Normalises by moments of the whole group; its backward includes the gradient through these moments."""

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
        variance_C = inverse_C.pow(-2)  # epsilon is in it already; torch 2.10's F.batch_norm refuses eps=0
        return torch.batch_norm(
            images_BCHW, weight_C, bias_C, mean_C, variance_C, False, 0.0, 0.0, torch.backends.cudnn.enabled
        )

    @staticmethod
    def backward(ctx: Any, grad_BCHW: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of images, and of this rank's share of weight and bias. Collective over the group."""
        images_BCHW, weight_C, mean_C, inverse_C = ctx.saved_tensors
        group: RankGroup = ctx.group
        is_last = images_BCHW.is_contiguous(memory_format=torch.channels_last)
        grad_BCHW = grad_BCHW.contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)
        count = images_BCHW.numel() // len(mean_C)
        # this rank's sums of the gradient, and of the gradient times (images - mean)
        if images_BCHW.is_cuda:
            sum_C, product_C, *_ = torch.batch_norm_backward_reduce(
                grad_BCHW, images_BCHW, mean_C, inverse_C, None, True, False, False
            )
        else:
            centred_BCHW, wide_BCHW = images_BCHW - mean_C[:, None, None], grad_BCHW.to(mean_C.dtype)
            sum_C, product_C = wide_BCHW.sum(PIXELS), (wide_BCHW * centred_BCHW).sum(PIXELS)
        sums_2C = torch.stack([sum_C, product_C])
        total_2C = group.gather(sums_2C.view(-1)).sum(0).view_as(sums_2C)
        if images_BCHW.is_cuda:
            counts_R = torch.full((group.num_ranks,), count, dtype=torch.int32, device=images_BCHW.device)
            grad_images_BCHW = torch.batch_norm_backward_elemt(
                grad_BCHW, images_BCHW, mean_C, inverse_C, weight_C, total_2C[0], total_2C[1], counts_R
            )
        else:
            # subtract the parts of the gradient that act through the mean and the variance
            mean_grad_C, product_mean_C = total_2C / (group.num_ranks * count)
            slope_C = product_mean_C * inverse_C.square()
            pulled_BCHW = grad_BCHW - mean_grad_C[:, None, None] - centred_BCHW * slope_C[:, None, None]
            grad_images_BCHW = (pulled_BCHW * (weight_C * inverse_C)[:, None, None]).to(images_BCHW.dtype)
        # this rank's share only for weight and bias: the reducer sums their gradients over all ranks anyway
        return grad_images_BCHW, product_C * inverse_C, sum_C, None, None, None
