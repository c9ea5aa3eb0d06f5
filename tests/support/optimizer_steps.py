"""Weights, gradients and scaled steps for the tests of optimizers."""

import copy

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

SHAPES = ((4, 3, 3, 3), (5, 7), (6,), ())
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def random_weights(seed=0, *, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return [w.to(device, dtype).requires_grad_() for w in weights]


def set_random_grads(weights, *, seed, scale=1.0):
    for index, weight in enumerate(weights):
        generator = torch.Generator().manual_seed(1000 * seed + index)
        grad = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        weight.grad = torch.empty_like(weight).copy_(scale * grad)  # in the weight's memory format, as in training


def groups_of(weights):
    """Groups of matrices, which adapt, and of the rest."""
    return [{"params": [w for w in weights if (w.dim() > 1) is m], "adapt": m} for m in (True, False)]


def assert_steps_follow(
    oracles, optimizer, weights, *, num_steps, rtol, largest_lr=0.05, least=1.0, change_grads=lambda: None
):
    """Steps at rates that change; an oracle for each weight takes the same gradients, in fp64.

    rtol: of the weight's largest number, or of least.
    """
    for seed, lr in enumerate(np.random.default_rng(0).uniform(0.0, largest_lr, num_steps)):
        set_random_grads(weights, seed=seed)
        change_grads()
        for group in optimizer.param_groups:
            group["lr"] = float(lr)
        for oracle, weight in zip(oracles, weights, strict=True):
            oracle.step(weight.grad.tolist(), float(lr))
        optimizer.step()
    for oracle, weight in zip(oracles, weights, strict=True):
        expected = torch.tensor(oracle.weight, dtype=weight.dtype)
        atol = rtol * max(least, float(expected.abs().max()))
        torch.testing.assert_close(weight.detach().cpu(), expected, rtol=rtol, atol=atol)


def clones(tensors):
    return [t.detach().clone() for t in tensors]


def assert_same_bits(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def assert_state_dict_resumes(make, *, resumed_as, states):
    """Five steps, a copy by its state_dict into an optimizer of other settings, and five more steps of both."""
    weights = random_weights()
    optimizer = make(weights)
    for seed in range(5):
        set_random_grads(weights, seed=seed)
        optimizer.step()
    resumed_weights = [w.requires_grad_() for w in clones(weights)]
    resumed = resumed_as(resumed_weights)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for seed in range(5, 10):
        for tensors, each in ((weights, optimizer), (resumed_weights, resumed)):
            set_random_grads(tensors, seed=seed)
            each.step()
    assert_same_bits(resumed_weights, weights)
    assert_same_bits(states(resumed), states(optimizer))


def assert_memory_format_changes_nothing(make):
    """Check memory formats of the weight, its gradient and its state."""

    def final_weight(weight_format, grad_format, state_format):
        weight = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0))
        weight = weight.to(memory_format=weight_format).requires_grad_()
        optimizer = make([weight])
        for seed in range(3):
            set_random_grads([weight], seed=seed)
            weight.grad = weight.grad.to(memory_format=grad_format)
            optimizer.step()
            state = optimizer.state[weight]
            state.update({key: t.to(memory_format=state_format) for key, t in state.items() if t.dim() == 4})
            assert any(t.dim() == 4 for t in state.values())
        return weight.detach().contiguous()

    plain, last = torch.contiguous_format, torch.channels_last
    expected = final_weight(plain, plain, plain)
    for formats in ((last, last, last), (plain, last, last), (last, plain, plain), (last, last, plain)):
        torch.testing.assert_close(final_weight(*formats), expected, rtol=1e-5, atol=1e-6)


def scaled_step(scaler, optimizer, weights, *, seed, poison=None, unscale_first=False):
    """One step as autograd and a GradScaler would make it, with gradients given instead of computed."""
    scale = scaler.scale(torch.ones((), device=weights[0].device))
    set_random_grads(weights, seed=seed, scale=float(scale))
    if poison is not None:
        weights[1].grad.view(-1)[2] = poison
    if unscale_first:
        scaler.unscale_(optimizer)
    before = clones(w.grad for w in weights)
    scaler.step(optimizer)
    torch.testing.assert_close([w.grad for w in weights], before, rtol=0, atol=0, equal_nan=True)
    scaler.update()


class Launches(TorchDispatchMode):
    """Lists the operations that a step on a GPU launches kernels for: a foreach one that needs a loop, once a tensor.

    By the conditions of torch's ForeachUtils.h and, for numbers on the device, ForeachPointwiseOp.cu. Where they hold,
    one kernel takes dozens of tensors, and the operation counts once. Views and unwritten memory launch nothing.
    """

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and not (func.is_view or name.startswith(("empty", "new_empty"))):
            looped = name.startswith("_foreach_") and not _is_one_kernel(name, args)
            self.names += [name] * (len(args[0]) if looped else 1)
        if name.startswith("_fused_"):
            return None  # in place, and without an implementation for tensors that have no values
        return func(*args, **(kwargs or {}))


def _is_one_kernel(name, args):
    lists = [arg for arg in args if isinstance(arg, list | tuple) and isinstance(arg[0], torch.Tensor)]
    first = lists[0][0]
    numbers = [arg for arg in args if isinstance(arg, torch.Tensor)]
    if name.startswith(("_foreach_addcmul", "_foreach_addcdiv")) and all(t.dim() == 0 for t in lists[1]):
        numbers += lists.pop(1)
    return all(
        (t.device, t.dtype, t.layout) == (first.device, first.dtype, torch.strided)
        for t in [*numbers, *(t for tensors in lists for t in tensors)]
    ) and all(
        # as one without gaps would be laid out
        _layout(t) == _layout(like) == _layout(torch.empty_like(like, device="meta"))
        for tensors in lists
        for t, like in zip(tensors, lists[0], strict=True)
    )


def _layout(tensor):
    return [(size, stride if size > 1 else 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
