"""What every rank of a test job runs: a script written for Horovod, over bigbatch.

`ranks_horovod.py optimizer BACKEND ...` or `horovod`; every mode ends with "all checks passed".
"""

import sys
from typing import Any

import pytest
import torch
from ranks import end_at_once, passed
from ranks_contract import check_group
from ranks_ddp import EXACT, Branches, images_of, loss_of, own_part
from torch import nn
from torch.nn.utils import clip_grad_norm_

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.broadcast import (
    all_reduce,
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from bigbatch.comm.gradients.distributed_optimizer import DistributedOptimizer
from bigbatch.errors import CommError


def check_optimizer(*backends: str) -> int:
    """Every check of the wrapper and of the broadcasts, over each backend."""
    connected = [connect(backend=backend, group_size=2) for backend in backends]
    for communicator in connected:
        for check in (check_training, check_broadcasts, check_all_reduce):
            check(communicator)
    for communicator in reversed(connected):  # the first one finalizes MPI
        communicator.close()
    return passed(connected[0])


def check_training(communicator: Communicator) -> None:
    """Passes, clipping, a schedule and a scaler together: the weights of a plain optimizer on the whole batch."""
    whole, own = Branches(), Branches()
    if communicator.rank != 0:
        nn.init.zeros_(own.layers[0].weight)
    broadcast_parameters(own.state_dict(), communicator)
    options: dict[str, Any] = {"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-3}
    reference = torch.optim.SGD(whole.parameters(), **options)
    optimizer = DistributedOptimizer(
        torch.optim.SGD(own.parameters(), **options),
        own.named_parameters(),
        communicator,
        backward_passes_per_step=2,
        threshold_bytes=1000,
        buffer_bytes=3000,
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    schedules = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in (optimizer, reference)]
    for step in range(5):
        optimizer.zero_grad()
        reference.zero_grad()
        for k in range(2):
            images_BC = images_of(2 * step + k, communicator.world_size)
            scaler.scale(loss_of(own, own_part(images_BC, communicator))).backward()
            loss_of(whole, images_BC).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        clip_grad_norm_([p for p in own.parameters() if p.grad is not None], 0.05)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        for p in whole.unused.parameters():  # no gradient, but decay: as in Horovod, it counts as zero
            p.grad = torch.zeros_like(p)
        clip_grad_norm_(whole.parameters(), 0.05)
        reference.step()
        for schedule in schedules:
            schedule.step()
    for ours, expected in zip(own.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours, expected, **EXACT)
    communicator.agree("the weights", "\n".join(str(p.sum().item().hex()) for p in own.parameters()))


def check_broadcasts(communicator: Communicator) -> None:
    """From the last rank: tensors of many kinds, an optimizer's state where others have none, an object."""
    root = communicator.world_size - 1
    is_root = communicator.rank == root
    expected = {
        "double": torch.arange(7, dtype=torch.float64),
        "half": torch.arange(3, dtype=torch.bfloat16),
        "count": torch.tensor(2**40 + 1),
        "flags": torch.tensor([True, False, True]),
        "columns": torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "none": torch.zeros(0),
    }
    tensors = {name: tensor.clone() if is_root else torch.zeros_like(tensor) for name, tensor in expected.items()}
    broadcast_parameters(tensors, communicator, root_rank=root)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
        assert tensors[name].stride() == tensor.stride(), name

    model = Branches()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25 if is_root else 0.5)
    if is_root:
        loss_of(model, images_of(1, 1)).backward()
        optimizer.step()
    broadcast_optimizer_state(optimizer, communicator, root_rank=root)
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert len(optimizer.state) == 12
    moments = [state["exp_avg"].sum().item().hex() for state in optimizer.state.values()]
    communicator.agree("the moments", "\n".join(moments))

    value = {"rank": communicator.rank, "epoch": 3, "text": "x" * 5000}
    assert broadcast_object(value, communicator, root_rank=root) == value | {"rank": root}

    odd = {"weight": torch.zeros(3 if is_root else 2)}
    with pytest.raises(CommError, match=rf"rank {root} and rank 0 .*'weight: \(3,\)"):
        broadcast_parameters(odd, communicator)
    for broadcast in (broadcast_parameters, broadcast_object):
        with pytest.raises(CommError, match="'root_rank=1' against 'root_rank=0'"):
            broadcast({"weight": torch.zeros(3)}, communicator, root_rank=communicator.rank)
    with pytest.raises(ValueError, match=r"cannot be sent: .*lambda"):
        broadcast_object(lambda: None, communicator, root_rank=root)


def check_all_reduce(communicator: Communicator) -> None:
    """Averages and sums, of counts too; not rounded by a narrow wire."""
    n = communicator.world_size
    mine = torch.full((2, 3), 1.0 + communicator.rank)
    average = all_reduce(mine, communicator)
    assert torch.equal(average, torch.full((2, 3), (n + 1) / 2))
    assert mine[0, 0].item() == 1.0 + communicator.rank
    assert all_reduce(torch.tensor(2**30 + communicator.rank), communicator, op="sum").item() == n * 2**30 + sum(
        range(n)
    )
    assert all_reduce(torch.tensor(1.0, dtype=torch.bfloat16), communicator, op="sum").item() == n


# --- the real Horovod ---


def check_horovod() -> int:
    """Our backend over Horovod, and our wrapper against Horovod's own, in one job."""
    import horovod.torch as hvd

    over_horovod, over_mpi = connect(backend="horovod"), connect(backend="mpi")
    check_transport(over_horovod)
    with pytest.raises(ValueError, match=r"'ring' .*horovod.*native"):
        over_horovod.with_algorithm("ring")
    for communicator in (over_horovod, over_mpi):
        for check in (check_training, check_broadcasts, check_all_reduce):
            check(communicator)
        for options in ({}, {"backward_passes_per_step": 3}, {"clip": 0.02}):
            check_against_horovod(hvd, communicator, **options)
    over_mpi.close()  # and leaves MPI to the other
    over_horovod.close()
    assert not hvd.is_initialized()
    return passed(over_horovod)


def check_transport(communicator: Communicator) -> None:
    """What Horovod has of the contract, on the world and on process sets, in each dtype that it states."""
    backend, n, rank = communicator.transport.backend, communicator.world_size, communicator.rank
    pair = backend.new_group([[0], list(range(1, n))])
    assert backend.new_group([[0], list(range(1, n))]) == pair  # a process set is made only once
    for group in (backend.world, pair):
        check_group(communicator, group, backend.capabilities.dtypes)
    empty_N = torch.zeros(0)
    backend.all_reduce_(empty_N, backend.world)
    with pytest.raises(ValueError, match=r"horovod .*torch\.bfloat16.*float64, float32, float16"):
        communicator.start(torch.ones(3, dtype=torch.bfloat16), label="bf16")
    values_N = torch.randn(1001, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    total_N = sum(torch.randn(1001, dtype=torch.float64, generator=torch.Generator().manual_seed(r)) for r in range(n))
    communicator.sum_(values_N, label="random values")
    torch.testing.assert_close(values_N, total_N, **EXACT)


def check_against_horovod(
    hvd: Any, communicator: Communicator, *, backward_passes_per_step: int = 1, clip: float | None = None
) -> None:
    """The same script twice, with Horovod's optimizer and with ours: the same weights, an unused layer included."""
    ours, theirs = Branches(), Branches()
    options: dict[str, Any] = {"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-3}
    passes = {"backward_passes_per_step": backward_passes_per_step}
    trained: list[tuple[nn.Module, Any]] = [
        (
            ours,
            DistributedOptimizer(
                torch.optim.SGD(ours.parameters(), **options), ours.named_parameters(), communicator, **passes
            ),
        ),
        (
            theirs,
            hvd.DistributedOptimizer(
                torch.optim.SGD(theirs.parameters(), **options), theirs.named_parameters(), **passes
            ),
        ),
    ]
    for model, optimizer in trained:
        for step in range(4):
            optimizer.zero_grad()
            for k in range(backward_passes_per_step):
                images_BC = images_of(10 * step + k, communicator.world_size)
                # each rank leaves out another layer
                loss_of(model, own_part(images_BC, communicator), without=communicator.rank).backward()
            if clip is None:
                optimizer.step()
                continue
            optimizer.synchronize()
            clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
    for p, q, before in zip(ours.parameters(), theirs.parameters(), Branches().parameters(), strict=True):
        torch.testing.assert_close(p, q, **EXACT)
        assert not torch.equal(p, before)


def main(mode: str, *arguments: str) -> int:
    """Run one mode."""
    torch.set_num_threads(1)
    return {"optimizer": check_optimizer, "horovod": check_horovod}[mode](*arguments)


if __name__ == "__main__":
    end_at_once(main, *sys.argv[1:])
