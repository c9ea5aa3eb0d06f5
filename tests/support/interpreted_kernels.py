"""Kernels by Triton's interpreter, in a process that has TRITON_INTERPRET=1 from its start: no GPU is needed."""

from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from lars_oracle import Oracle
from optimizer_steps import assert_steps_follow, random_weights, set_random_grads
from torch import Tensor

from bigbatch.trainer.models.max_pool import MaxPool3x3, has_form, register_operators
from bigbatch.trainer.optim import lars
from bigbatch.trainer.optim.lars import LARS, MOMENTUM_FORMS
from bigbatch.trainer.optim.scaled_step import BLOCK


class PoolAnywhere(MaxPool3x3):
    """Goes to the kernels on a CPU, too."""

    def _fits(self, images_BCHW: Tensor) -> bool:
        return has_form(images_BCHW)


def _compare_pools(pool: Callable[[Tensor], Tensor], images_BCHW: Tensor) -> None:
    """Maxima, and where the gradients go: torch's. Up to four summands of a gradient are added in another order."""
    batch, channels, height, width = images_BCHW.shape
    grad_BCHW = torch.randn(batch, channels, height // 2, width // 2)
    found = []
    for each in (pool, lambda images: F.max_pool2d(images, 3, 2, 1)):
        given_BCHW = images_BCHW.clone(memory_format=torch.preserve_format).requires_grad_()
        pooled_BCHW = each(given_BCHW)
        found.append((pooled_BCHW, torch.autograd.grad(pooled_BCHW, given_BCHW, grad_BCHW)[0]))
    (ours_BCHW, our_grad_BCHW), (pooled_BCHW, want_BCHW) = found
    torch.testing.assert_close(ours_BCHW, pooled_BCHW, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(our_grad_BCHW, want_BCHW, rtol=0, atol=4 * torch.finfo().eps * 4)
    assert ours_BCHW.is_contiguous(memory_format=torch.channels_last)


def pool_like_torch() -> int:
    """The max-pool, with equal maxima, sizes that fill no program, NaN and -inf."""
    register_operators()
    pool = PoolAnywhere().train()
    torch.manual_seed(0)
    for shape in ((2, 8, 12, 16), (1, 3, 2, 2), (3, 5, 6, 4)):  # the last two fill no program
        images_BCHW = torch.randn(shape).mul(4).round().contiguous(memory_format=torch.channels_last)
        _compare_pools(pool, images_BCHW)
    images_BCHW[0, 0, 1, 1], images_BCHW[1] = float("nan"), float("-inf")
    _compare_pools(pool, images_BCHW)
    return 0


def _assert_scale_changes_nothing(weights: list[Tensor], settings: dict[str, Any]) -> None:
    """A loss scale that is a power of two, and a rate on the device as in a CUDA graph, leave the bits as they are."""
    ways = []
    for scale, rate in ((1.0, 0.5), (64.0, torch.tensor(0.5))):
        copies = [w.detach().clone() for w in weights]
        optimizer = LARS(copies, lr=0.5, **settings)
        optimizer.param_groups[0]["lr"] = rate
        if scale != 1:
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(())
        for seed in range(2):
            set_random_grads(copies, seed=seed, scale=scale)
            optimizer.step()
        ways.append(copies)
    assert all(map(torch.equal, *ways))


def lars_by_its_formula() -> int:
    """LARS with the kernel of a GPU: a tensor of several programs, zero weights, and a step that overflows."""
    lars.can_step = lambda _weight: True
    LARS._update_on_cpu_ = LARS._update_at_once_  # type: ignore[method-assign]
    for form, nesterov, momentum in product(MOMENTUM_FORMS, (False, True), (0.9, 0.0)):
        settings = {"momentum": momentum, "weight_decay": 0.1, "eps": 0.0, "nesterov": nesterov}
        if nesterov and not momentum:
            continue
        weights = [*random_weights(0), torch.randn(2 * BLOCK + 3).requires_grad_()]
        with torch.no_grad():
            weights[0].zero_()
        optimizer = LARS(weights, lr=1.0, momentum_form=form, **settings)
        oracles = [Oracle(w.tolist(), form=form, adapt=True, **settings) for w in weights]
        assert_steps_follow(oracles, optimizer, weights, num_steps=10, rtol=2e-5, largest_lr=1.0, least=1e-7)
        assert optimizer._step._tables
        _assert_scale_changes_nothing(weights, settings | {"momentum_form": form})
        before = [w.detach().clone() for w in weights]
        optimizer.found_inf = torch.ones(())
        optimizer.step()
        assert all(map(torch.equal, weights, before))
    return 0
