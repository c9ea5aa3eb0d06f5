"""Ghost batches over real ranks against plain batch norm of the whole in float64, and the loss of one of the ranks."""

import os
import signal
import time
from typing import Any

import pytest
import torch
from ranks_reducer import set_weights_
from torch import Tensor, nn

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.exposed_time import ExposedTime
from bigbatch.comm.gradients.group_gather import make_group_gather
from bigbatch.comm.gradients.reducer import GradientReducer
from bigbatch.errors import PeerLostError
from bigbatch.trainer.models.norm import GhostBatchNorm2d
from bigbatch.trainer.models.spread_norm import RankGroup

C, PART = 3, 4
LABEL = "batch-norm statistics"
SURVIVED = 7


def rank_group(communicator: Communicator, group_size: int, exposed: ExposedTime) -> RankGroup:
    gather = make_group_gather(communicator.transport, group_size=group_size, exposed=exposed, what=LABEL)
    return RankGroup(group_size, gather)


def check_norm(communicator: Communicator) -> None:
    """Every group size that there can be, in each precision; others are refused."""
    exposed, world_size = ExposedTime(), communicator.world_size
    with pytest.raises(ValueError, match=rf"\b{world_size} ranks?\b.*\b{world_size + 1}\b"):
        make_group_gather(communicator.transport, group_size=world_size + 1, exposed=exposed, what=LABEL)
    for group_size in (2, 4):
        if world_size % group_size == 0:
            group = rank_group(communicator, group_size, exposed)
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                if dtype in communicator.transport.backend.capabilities.dtypes:
                    check_against_the_whole(communicator, group, dtype)
            check_beside_gradients(communicator, group, exposed)
            assert exposed.take_seconds() > 0


def check_against_the_whole(communicator: Communicator, group: RankGroup, dtype: torch.dtype) -> None:
    """Two ghost batches in one step: outputs, gradients and running statistics."""
    first = communicator.rank // group.num_ranks * group.num_ranks
    norm, whole = GhostBatchNorm2d(C, bn_span=group.num_ranks * PART, ghosts_per_step=2, group=group), nn.BatchNorm2d(C)
    whole.double()
    statistics = []
    for ghost in range(2):
        parts = [make_part(rank, ghost, dtype) for rank in range(first, first + group.num_ranks)]
        inputs, grads = (torch.cat(tensors).double() for tensors in zip(*parts, strict=True))
        norm.zero_grad()
        whole.zero_grad()
        whole.reset_running_stats()
        whole.momentum = None  # a plain mean, here of one batch
        expected = inputs.requires_grad_()
        want = whole(expected)
        want.backward(grads)
        statistics.append((whole.running_mean.clone(), whole.running_var.clone()))
        mine = slice((communicator.rank - first) * PART, (communicator.rank - first + 1) * PART)
        own = make_part(communicator.rank, ghost, dtype)[0].requires_grad_()
        got = norm(own)
        got.backward(make_part(communicator.rank, ghost, dtype)[1])
        rounding = max(1e-5, 2 * torch.finfo(dtype).eps)
        torch.testing.assert_close(got.double(), want[mine], rtol=rounding, atol=rounding)
        torch.testing.assert_close(own.grad.double(), expected.grad[mine], rtol=rounding, atol=rounding)
        for parameter, plain in zip(norm.parameters(), whole.parameters(), strict=True):
            sum_C = group.gather(parameter.grad).sum(0)
            torch.testing.assert_close(sum_C.double(), plain.grad, rtol=1e-4, atol=1e-3)
    for running, start, of_ghosts in zip(
        (norm.running_mean, norm.running_var), (0.0, 1.0), zip(*statistics, strict=True), strict=True
    ):
        want = 0.9 * start + 0.1 * torch.stack(of_ghosts).mean(0)
        torch.testing.assert_close(running.double(), want, rtol=1e-5, atol=1e-5)


def make_part(rank: int, ghost: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A rank's images of a ghost batch and their gradient: mean and spread differ from rank to rank."""
    generator = torch.Generator().manual_seed(100 * ghost + rank)
    both = torch.randn(2, PART, C, 5, 6, generator=generator, device="cpu") * (rank + 1) + rank % 3
    inputs, grads = both.to(torch.get_default_device(), dtype)
    return inputs.to(memory_format=torch.channels_last), grads.to(memory_format=torch.channels_last)


def make_model(group: RankGroup) -> nn.Sequential:
    """Three norm layers; several buffers of gradients are in flight while backward gathers."""
    layers: list[nn.Module] = []
    for _ in range(3):
        set_weights_(conv := nn.Conv2d(C, C, 3, padding=1))
        layers += [conv, GhostBatchNorm2d(C, bn_span=group.num_ranks * PART, ghosts_per_step=1, group=group)]
    return nn.Sequential(*layers)


def check_beside_gradients(communicator: Communicator, group: RankGroup, exposed: ExposedTime) -> None:
    """Gathers take their turn among sums of gradients, and neither is mistaken for the other: against one process."""
    model = make_model(group)
    reducer = GradientReducer(
        model.named_parameters(), communicator, threshold_bytes=1, buffer_bytes=100, exposed=exposed
    )
    assert len(reducer.buffers) > 3
    for _ in range(2):  # the first step learns the order
        reducer.zero_grad()
        model(make_part(communicator.rank, 0, torch.float32)[0]).square().mul(0.01).sum().backward()
        reducer.wait()
    twin = torch.nn.Sequential(
        *(nn.BatchNorm2d(C) if isinstance(layer, nn.BatchNorm2d) else layer for layer in make_model(group))
    ).double()
    for first in range(0, communicator.world_size, group.num_ranks):
        ranks = range(first, first + group.num_ranks)
        whole = torch.cat([make_part(rank, 0, torch.float32)[0] for rank in ranks]).double()
        twin(whole).square().mul(0.01).sum().backward()
    scale = max(float(parameter.grad.abs().max()) for parameter in twin.parameters())
    for ours, plain in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), plain.grad, rtol=1e-4, atol=1e-5 * scale)


def lose_in_a_norm(backend: str, where: str, timeout_seconds: str) -> int:
    """Rank 1 of 4 dies between two norm layers; all others must notice and name it, also the other group."""
    communicator = connect(backend=backend, timeout_seconds=float(timeout_seconds))
    group = rank_group(communicator, 2, ExposedTime())
    model = make_model(group)
    if communicator.rank == 1:
        second: Any = model[3]
        register = {"forward": second.register_forward_pre_hook, "backward": second.register_full_backward_pre_hook}
        register[where](lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    reducer = GradientReducer(model.named_parameters(), communicator)
    start = time.monotonic()
    try:
        model(make_part(communicator.rank, 0, torch.float32)[0]).square().sum().backward()
        reducer.wait()
    except PeerLostError as error:
        print(f"noticed after {time.monotonic() - start:.1f} s: {error}", flush=True)
        return SURVIVED
    return 0
