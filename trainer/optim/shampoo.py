"""Shampoo (Gupta et al. 2018, arXiv 1802.09568) in blocks, grafted to SGD (Anil et al. 2020, arXiv 2002.09018)."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bigbatch.trainer.config.sections import OptimizerConfig
from bigbatch.trainer.optim.fused import (
    count_steps_,
    norms_of,
    one_where_a_norm_is_zero,
    overflow_flag,
    problem_with_number,
    scaled,
    shape_of,
    unscaled_grads,
)
from bigbatch.trainer.optim.matrices import MatrixOptimizer, batched_by_shape, problem_with_count, sgd_step_, updatable


class Shampoo(MatrixOptimizer):
    """Does Nesterov SGD with gradients that are preconditioned on both sides, and keep their norm.

    G is the gradient of a weight W as a matrix; a convolution has one row per filter (out x in * kh * kw). Matrices are
    cut into blocks of at most block_size rows and columns, as equal as possible:
    L = factor_decay * L + (1 - factor_decay) * G Gᵀ;  R likewise with Gᵀ G
    P = L ** (-1/4) G R ** (-1/4);  u = P * |G| / |P|, with norms of the whole tensor (grafting to SGD)
    v = momentum * v + u + weight_decay * W;  W -= lr * (u + weight_decay * W + momentum * v); lr * v without nesterov
    The roots are computed in update 1, 1 + root_every_steps and so on; smaller eigenvalues are raised to eps * largest.
    A group with `adapt=False` (bias, batch norm, all that has fewer than two dimensions) has u = G, so that the
    settings of a tuned SGD apply to it.

    Momentum and decay can differ per parameter group. Gradients are not changed. A GradScaler's scale and overflow flag
    are applied on the device, and an overflow leaves weights and state untouched; the host waits for the device only
    if roots may be due.
    """

    _own = (*MatrixOptimizer._own, "_block_size", "_every", "_factor_decay", "_eps", "_calls_before_roots")
    _does = "preconditions matrices"
    replicated_state = ("factors", "roots", "step")

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = True,
        block_size: int = 1024,
        root_every_steps: int = 10,
        factor_decay: float = 0.95,
        eps: float = 1e-6,
        adapt: bool = True,
    ) -> None:
        """Check the settings. Raises: ValueError if one is out of range, or if a group that adapts has vectors."""
        counts = {"block_size": block_size, "root_every_steps": root_every_steps}
        problems = [problem_with_count(key, value) for key, value in counts.items()]
        problems += [problem_with_number("factor_decay", factor_decay, below=1), problem_with_number("eps", eps)]
        if problem := next(filter(None, problems), None):
            raise ValueError(problem)
        if eps == 0:
            raise ValueError(f"eps must be positive, such as 1e-6, not {eps}: an eigenvalue of 0 has no inverse root")
        self._block_size, self._every, self._factor_decay, self._eps = block_size, root_every_steps, factor_decay, eps
        self._calls_before_roots = 0
        """Calls before roots can be due; 0: read the update count from the device, for which the host waits."""
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov, "adapt": adapt}
        super().__init__(params, defaults)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state; the next call counts from its update count."""
        super().load_state_dict(state_dict)
        self._calls_before_roots = 0

    def _update_groups_(self) -> None:
        parts = updatable(self.param_groups)
        own = [(group, weights, unscaled_grads(self, weights)) for group, weights in parts if group["adapt"]]
        all_weights = [w for _, weights, _ in own for w in weights]
        whole = iter(self.wholes.gather(all_weights, [g for _, _, grads in own for g in grads]))
        matrices = [(group, weights, [next(whole) for _ in weights]) for group, weights, _ in own]
        for _, weights, grads in matrices:
            self._make_state(weights)
            self._update_factors_(weights, grads)
        finish = self._start_roots(all_weights)
        # while the other ranks' roots are in transit
        for group, weights in parts:
            if not group["adapt"]:
                sgd_step_(self, weights, group)
        finish()
        for group, weights, grads in matrices:
            sgd_step_(self, weights, group, self.wholes.own(weights, self._grafted(weights, grads)))

    def _make_state(self, weights: list[Tensor]) -> None:
        """Make factors of zeros and roots of identity: until roots are due, a weight follows SGD."""
        for w in weights:
            state = self.state[w]
            if "factors" not in state:
                state["factors"] = w.new_zeros(sum(side**2 for side in self._sides(w)))
                state["roots"] = torch.zeros_like(state["factors"])
                for root_NN in self._squares(w, "roots"):
                    root_NN.fill_diagonal_(1.0)
        count_steps_(self, weights)

    def _squares(self, weight: Tensor, name: str) -> list[Tensor]:
        """Return the left and the right square of each block, as views of one vector."""
        sizes = self._sides(weight)
        parts = self.state[weight][name].split([size**2 for size in sizes])
        return [part.view(size, size) for part, size in zip(parts, sizes, strict=True)]

    def _sides(self, weight: Tensor) -> list[int]:
        return [size for shape in block_shapes(shape_of(weight), block_size=self._block_size) for size in shape]

    def _shapes(self, weight: Tensor, group: dict[str, Any]) -> dict[str, torch.Size]:
        shapes = super()._shapes(weight, group)
        if group["adapt"]:
            squares = torch.Size([sum(side**2 for side in self._sides(weight))])
            shapes |= {"factors": squares, "roots": squares, "step": torch.Size()}
        return shapes

    def _blocks(self, tensor: Tensor) -> list[Tensor]:
        """Return the blocks of a tensor as a matrix: views if its memory layout allows it."""
        return blocks(tensor.reshape(len(tensor), -1), block_size=self._block_size)

    def _update_factors_(self, weights: list[Tensor], grads: list[Tensor]) -> None:
        """Update the factors with the gradient, and count the update; neither on overflow."""
        overflow = overflow_flag(self, weights[0].device)
        share = torch.full((), 1 - self._factor_decay, dtype=weights[0].dtype, device=weights[0].device)
        if overflow is not None:
            share = share * (1 - overflow).to(share.dtype)
            # 0 times infinity would get into the factors
            grads = [torch.where(overflow > 0, torch.zeros_like(g), g) for g in grads]
        for weight, grad in zip(weights, grads, strict=True):
            squares = iter(self._squares(weight, "factors"))
            for block_MN in self._blocks(grad):
                next(squares).lerp_(block_MN @ block_MN.mT, share)
                next(squares).lerp_(block_MN.mT @ block_MN, share)
        # a list: for a single 0-d tensor torch would call .item(), a host sync
        counted = 1.0 if overflow is None else [1 - overflow] * len(weights)
        torch._foreach_add_([self.state[w]["step"] for w in weights], counted)

    def _start_roots(self, weights: list[Tensor]) -> Callable[[], None]:
        """Start to compute roots that are due; the returned function waits for them."""
        if not weights or not self._are_roots_due(weights):
            return lambda: None
        factors = [square for w in weights for square in self._squares(w, "factors")]
        roots = [square for w in weights for square in self._squares(w, "roots")]
        costs = [float(len(factor)) ** 3 for factor in factors]
        finish = self.divide(factors, partial(inverse_fourth_roots, eps=self._eps), costs=costs, dtype=factors[0].dtype)

        def finish_() -> None:
            torch._foreach_copy_(roots, finish())

        return finish_

    def _are_roots_due(self, weights: list[Tensor]) -> bool:
        """Return whether this is update 1, 1 + root_every_steps and so on: skipped calls do not count."""
        if self._calls_before_roots:
            self._calls_before_roots -= 1
            return False
        overflow = overflow_flag(self, weights[0].device)
        # the same on all ranks, because the counts and the flag are
        is_skipped = overflow is not None and bool(overflow)
        since = (max(int(self.state[w]["step"]) for w in weights) - 1) % self._every
        if is_skipped or since:
            self._calls_before_roots = 0 if is_skipped else self._every - 1 - since
            return False
        self._calls_before_roots = self._every - 1
        return True

    def _grafted(self, weights: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
        """Return the preconditioned gradients, each with the norm and the memory layout of its gradient."""
        directions = []
        for weight, grad in zip(weights, grads, strict=True):
            direction_MN = grad.new_empty((len(grad), math.prod(grad.shape[1:])))
            roots = iter(self._squares(weight, "roots"))
            for block_MN, out_MN in zip(self._blocks(grad), self._blocks(direction_MN), strict=True):
                out_MN.copy_(next(roots) @ block_MN @ next(roots))
            directions.append(torch.empty_like(grad).copy_(direction_MN.view(grad.shape)))
        g_N, p_N = norms_of([*grads, *directions]).view(2, -1)
        return scaled(directions, one_where_a_norm_is_zero(g_N / p_N, g_N, p_N))


def blocks(matrix_MN: Tensor, *, block_size: int) -> list[Tensor]:
    """Cut a matrix into blocks of at most this many rows and columns, row by row: views."""
    num_rows, num_columns = (-(-size // block_size) for size in matrix_MN.shape)
    return [part for rows in matrix_MN.tensor_split(num_rows) for part in rows.tensor_split(num_columns, dim=1)]


def block_shapes(shape: Iterable[int], *, block_size: int) -> list[tuple[int, int]]:
    """List rows and columns of each block of a weight."""
    rows, *others = shape
    matrix_MN = torch.empty((rows, math.prod(others)), device="meta")
    return [(part.size(0), part.size(1)) for part in blocks(matrix_MN, block_size=block_size)]


def shared_work(settings: OptimizerConfig, shapes: Iterable[torch.Size]) -> list[tuple[float, int]]:
    """List cost, up to a common factor, and elements of each root that ranks divide, for weights of these shapes."""
    size = (settings.options or {})["block_size"]
    sizes = (side for each in shapes for block in block_shapes(each, block_size=size) for side in block)
    return [(float(size) ** 3, size**2) for size in sizes]


def inverse_fourth_root(matrices_BNN: Tensor, *, eps: float) -> Tensor:
    """Return A ** (-1/4) of each positive semidefinite A; eigenvalues count as at least eps times the largest.

    A matrix of zeros gives eps ** (-1/4) times the identity; one that is not finite gives NaN, which the check for a
    diverged run finds, while LAPACK would raise.
    """
    is_finite_B11 = matrices_BNN.isfinite().all(dim=(1, 2), keepdim=True)
    identity_NN = torch.eye(matrices_BNN.size(-1), dtype=torch.float64, device=matrices_BNN.device)
    doubled_BNN = torch.where(is_finite_B11, matrices_BNN.double(), identity_NN)
    scale_B11 = doubled_BNN.abs().amax(dim=(1, 2), keepdim=True)
    scale_B11 = torch.where(scale_B11 > 0, scale_B11, torch.ones_like(scale_B11))
    values_BN, vectors_BNN = _eigh(doubled_BNN / scale_B11)
    largest_B1 = values_BN[:, -1:]
    largest_B1 = torch.where(largest_B1 > 0, largest_B1, torch.ones_like(largest_B1))
    powers_BN = (values_BN / largest_B1).clamp(min=eps).pow(-0.25) * (largest_B1 * scale_B11.squeeze(2)).pow(-0.25)
    roots_BNN = (vectors_BNN * powers_BN.unsqueeze(1)) @ vectors_BNN.mT
    return torch.where(is_finite_B11, roots_BNN, torch.full_like(identity_NN, torch.nan)).to(matrices_BNN.dtype)


def _eigh(matrices_BNN: Tensor) -> tuple[Tensor, Tensor]:
    """Return eigenvalues and eigenvectors of fp64 matrices with largest element 1.

    LAPACK does not converge for some matrices of low rank with rows of zeros, such as those of a convolution that sees
    only padding: for many in fp32, for few in fp64. Adding 1 to the diagonal keeps the eigenvectors.
    """
    try:
        values_BN, vectors_BNN = torch.linalg.eigh(matrices_BNN)
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]  # its stub lacks the name
        identity_NN = torch.eye(matrices_BNN.size(-1), dtype=matrices_BNN.dtype, device=matrices_BNN.device)
        values_BN, vectors_BNN = torch.linalg.eigh(matrices_BNN + identity_NN)
        values_BN = values_BN - 1
    return values_BN, vectors_BNN


def inverse_fourth_roots(tensors: list[Tensor], *, eps: float) -> list[Tensor]:
    """Return the roots of square matrices; those of one size go through one decomposition."""
    return batched_by_shape(tensors, lambda some: list(inverse_fourth_root(torch.stack(some), eps=eps)))
