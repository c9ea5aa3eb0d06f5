"""Batch norm of all ghost batches of a microbatch as one view, for torch's compiler (docs/decisions/144)."""

import operator
from collections.abc import Sequence
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import Tensor


class NormalizeGhostViews(torch.autograd.Function):
    """Normalises microbatches as views (ghosts, images, channels, height, width), and adds them; then ReLU if has_relu.

    For a compiler, which makes one set of kernels of it for any number of ghost batches: eager, it makes more passes
    over memory than torch's kernel. Only the images are kept for backward, which computes the ReLU's mask from them.
    """

    @staticmethod
    def forward(ctx: Any, num_ghosts: int, eps: float, has_relu: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the result in the dtype of the images, and each norm's mean and biased variance (G, C) in its own.

        tensors: images (B, C, H, W), weight and bias (C) of each norm in turn.
        """
        terms, moments = [], []
        for images_BCHW, weight_C, bias_C in _groups_of(3, tensors):
            ghosts = images_BCHW.view(num_ghosts, -1, *images_BCHW.shape[1:]).to(weight_C.dtype)
            var_G1C11, mean_G1C11 = torch.var_mean(ghosts, dim=(1, 3, 4), correction=0, keepdim=True)
            terms.append((images_BCHW, weight_C, bias_C, mean_G1C11, torch.rsqrt(var_G1C11 + eps)))
            moments += [mean_G1C11.flatten(1), var_G1C11.flatten(1)]
        # flat before the last operation: the compiler stores a result that is a view in another order, and copies it
        result_BCHW = _sum(terms, [_unit(*term) for term in terms]).flatten(0, 1)
        result_BCHW = torch.relu(result_BCHW) if has_relu else result_BCHW
        ctx.save_for_backward(*chain.from_iterable(terms))
        ctx.has_relu = has_relu
        ctx.mark_non_differentiable(*moments)
        return result_BCHW.to(tensors[0].dtype), *moments

    @staticmethod
    def backward(ctx: Any, grad_BCHW: Tensor, *_moments: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of images, weights and biases (Ioffe and Szegedy 2015, section 3)."""
        terms = _groups_of(5, ctx.saved_tensors)
        units = [_unit(*term) for term in terms]
        num_ghosts, channels = len(units[0]), units[0].shape[2]
        grad = grad_BCHW.view(num_ghosts, -1, *grad_BCHW.shape[1:]).to(units[0].dtype)  # torch 2.10 traces no unflatten
        if ctx.has_relu:
            grad = torch.where(_sum(terms, units) <= 0, 0, grad)
        sum_G1C11, count = grad.sum((1, 3, 4), keepdim=True), grad[0].numel() // channels
        images_grads, sums = [], []
        for (images_BCHW, weight_C, _, _, inverse_G1C11), unit in zip(terms, units, strict=True):
            unit_sum_G1C11 = (grad * unit).sum((1, 3, 4), keepdim=True)
            pull = sum_G1C11 / count + unit * (unit_sum_G1C11 / count)
            images_grad = (grad - pull) * (inverse_G1C11 * weight_C[:, None, None])
            images_grads.append(images_grad.to(images_BCHW.dtype).flatten(0, 1))
            sums += [unit_sum_G1C11, sum_G1C11]
        # stacked: one kernel sums all over the ghost batches, of which a single one needs none; two biases share none
        is_stacked = num_ghosts > 1 or len(terms) > 1
        affine_grads_C = torch.stack(sums).flatten(2).sum(1) if is_stacked else [t.flatten() for t in sums]
        grads = zip(images_grads, affine_grads_C[::2], affine_grads_C[1::2], strict=True)
        return None, None, None, *chain.from_iterable(grads)


def _groups_of(size: int, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    return [tensors[first : first + size] for first in range(0, len(tensors), size)]


def _unit(images_BCHW: Tensor, weight_C: Tensor, _: Tensor, mean_G1C11: Tensor, inverse_G1C11: Tensor) -> Tensor:
    ghosts = images_BCHW.view(len(mean_G1C11), -1, *images_BCHW.shape[1:]).to(weight_C.dtype)
    return (ghosts - mean_G1C11) * inverse_G1C11


def _sum(terms: Sequence[Sequence[Tensor]], units: Sequence[Tensor]) -> Tensor:
    scaled = (
        unit * weight_C[:, None, None] + bias_C[:, None, None]
        for (_, weight_C, bias_C, *_), unit in zip(terms, units, strict=True)
    )
    return reduce(operator.add, scaled)


def normalize_views(*terms: tuple[Any, Tensor], has_relu: bool) -> Tensor:
    """Compute the sum of norm(images) of all terms, with ReLU if has_relu, and update running statistics in place.

    Only if each norm.joins_relu(images). All have the same shape, eps and number of ghost batches.
    """
    tensors = [tensor for norm, images_BCHW in terms for tensor in (images_BCHW, norm.weight, norm.bias)]
    momenta = [norm.take_momenta(images_BCHW.shape) for norm, images_BCHW in terms]
    num_ghosts, eps = len(momenta[0]), terms[0][0].eps
    result_BCHW: Tensor
    result_BCHW, *moments = NormalizeGhostViews.apply(num_ghosts, eps, has_relu, *tensors)
    count = result_BCHW[:, 0].numel() // num_ghosts
    for (norm, _), (mean_GC, var_GC), weights in zip(terms, _groups_of(2, moments), momenta, strict=True):
        running = norm.gathered or (norm.running_mean, norm.running_var)
        for running_C, moments_GC in zip(running, (mean_GC, var_GC * (count / (count - 1))), strict=True):
            updated_C = running_C
            for momentum, moment_C in zip(weights, moments_GC, strict=True):
                updated_C = momentum * moment_C + (1 - momentum) * updated_C
            running_C.copy_(updated_C)
    return result_BCHW
