"""What every rank of a test job runs: a user's DDP script with our hook.

`ranks_ddp.py ddp BACKEND ...`, `shared-group` or `lose BACKEND VICTIM`; all but lose end with "all checks passed".
"""

import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
from patient_count import await_all_but
from ranks import SURVIVED, passed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.ddp_hook import ddp_comm_hook
from bigbatch.comm.gradients.reducer import GradientReducer

IMAGES_PER_RANK = 4
EXACT = {"rtol": 1e-11, "atol": 1e-14}


class Branches(nn.Module):
    """Six layers, one of which a step may leave out, and one that none uses; the same on every rank."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(16, 16, dtype=torch.float64) for _ in range(6)])
        self.unused = nn.Linear(16, 16, dtype=torch.float64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, images_BC: Tensor, *, without: int | None = None) -> Tensor:
        for k, layer in enumerate(self.layers):
            if k != without:
                images_BC = layer(images_BC).tanh()
        return images_BC


def loss_of(model: nn.Module, images_BC: Tensor, *, without: int | None = None) -> Tensor:
    """A mean over the images that it is given."""
    return model(images_BC, without=without).square().mean()


def images_of(step: int, num_ranks: int) -> Tensor:
    """The images of all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(IMAGES_PER_RANK * num_ranks, 16, dtype=torch.float64, generator=generator)


def own_part(images_BC: Tensor, communicator: Communicator) -> Tensor:
    """This rank's images."""
    return images_BC.tensor_split(communicator.world_size)[communicator.rank]


def check_ddp(*backends: str) -> int:
    """A DDP script: its own process group first, then connect() and the hook."""
    dist.init_process_group("gloo")
    connected = [connect(backend=backend, group_size=2) for backend in backends]
    for communicator in connected:
        for algorithm in communicator.transport.algorithms:
            check_ddp_gradients(communicator.with_algorithm(algorithm), torch.float64, **EXACT)
        check_ddp_gradients(communicator, torch.float32, rtol=1e-4, atol=1e-8)
        check_ddp_narrow_wire(communicator)
        communicator.close()
    dist.destroy_process_group()
    return passed(connected[0])


def hooked(model: nn.Module, communicator: Communicator) -> DistributedDataParallel:
    """DDP with several small buckets, and our hook."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=3e-3, find_unused_parameters=True)
    ddp.register_comm_hook(None, ddp_comm_hook(communicator))
    return ddp


def check_ddp_gradients(communicator: Communicator, dtype: torch.dtype, **tolerance: float) -> None:
    """Hook and reducer have the whole batch's gradients, and DDP's own, though a layer is left out in turns."""
    whole, own, plain, reduced = Branches(), *(Branches().to(dtype) for _ in range(3))
    ddp = hooked(own, communicator)
    reducer = GradientReducer(reduced.named_parameters(), communicator, average=True, threshold_bytes=3000)
    plain_ddp = DistributedDataParallel(plain, find_unused_parameters=True)
    for step in range(20):
        images_BC = images_of(step, communicator.world_size)
        for model in (whole, ddp, plain_ddp, reducer):
            model.zero_grad()
        loss_of(whole, images_BC, without=step % 7).backward()
        for model in (ddp, plain_ddp, reduced):
            loss_of(model, own_part(images_BC, communicator).to(dtype), without=step % 7).backward()
        reducer.wait()
        for (name, ours), theirs, reference, averaged in zip(
            own.named_parameters(), plain.parameters(), whole.parameters(), reduced.parameters(), strict=True
        ):
            case = f"{communicator} step {step} {name}"
            assert (ours.grad is None) == (theirs.grad is None) == (reference.grad is None), case
            if reference.grad is not None:
                torch.testing.assert_close(ours.grad, reference.grad.to(dtype), **tolerance)
                torch.testing.assert_close(ours.grad, theirs.grad, **tolerance)
            of_ddp = torch.zeros_like(averaged) if theirs.grad is None else theirs.grad  # unused ones count as zero
            torch.testing.assert_close(averaged.grad, of_ddp, **tolerance, msg=case)
    reducer.close()


def check_ddp_narrow_wire(communicator: Communicator) -> None:
    """fp32 gradients over an fp16 wire: at most n roundings of a partial sum, each of relative size 2**-11."""
    narrow = connect(backend=communicator.transport.backend.name, wire_dtype="float16", predivide=2.0)
    n = narrow.world_size
    own, whole = Branches().float(), Branches()
    ddp = hooked(own, narrow)
    images_BC = images_of(99, n)
    loss_of(ddp, own_part(images_BC, narrow).float()).backward()
    parts = []
    for part_BC in images_BC.tensor_split(n):
        whole.zero_grad()
        loss_of(whole, part_BC).backward()
        parts.append([p.grad.clone() for p in whole.parameters() if p.grad is not None])
    used = [p for p in own.parameters() if p.grad is not None]
    is_rounded = False
    for k, ours in enumerate(used):
        terms = torch.stack([part[k] for part in parts])
        # gradients below fp16's normal range have an absolute error instead
        bound = n * (2.0**-11 * terms.abs().sum(0) + 2.0**-23) / n + 1e-6 * terms.abs().max()
        error = (ours.grad.double() - terms.mean(0)).abs()
        assert bool((error <= bound).all()), f"error {error.max()}"
        is_rounded |= bool((error > 1e-6 * terms.abs().max()).any())
    assert is_rounded, "nothing was rounded, so nothing travelled in fp16"
    narrow.close()


def check_shared_group() -> int:
    """DDP in the default process group that a gloo communicator made: its collectives do not meet ours."""
    communicator = connect(backend="gloo")
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(4, 4, bias=False) for _ in range(3)])

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x_BC: Tensor, skipped: int) -> Tensor:
            for k, layer in enumerate(self.layers):
                x_BC = x_BC if k == skipped else layer(x_BC)
            return x_BC

    ddp = DistributedDataParallel(Skipping(), find_unused_parameters=True, bucket_cap_mb=1e-5)
    ddp.register_comm_hook(None, ddp_comm_hook(communicator))
    for step in range(10):
        ddp(torch.ones(2, 4), (step + communicator.rank) % 3).sum().backward()
        communicator.agree("gradients", str([layer.weight.grad.tolist() for layer in layers]))
        ddp.zero_grad()
    communicator.close()
    return passed(communicator)


def lose_a_rank(backend: str, victim: str) -> int:
    """DDP until one rank dies between two steps; backward of the others must end, and name it.

    The model has no buffers, and DDP need not find unused parameters: it has no collectives of its own to fail first.
    """
    await_all_but(int(victim))
    dist.init_process_group("gloo")
    communicator = connect(backend=backend, timeout_seconds=60)
    others = communicator.gather(str(os.getpid()))[1:]
    ddp = DistributedDataParallel(nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)]), bucket_cap_mb=1e-3)
    ddp.register_comm_hook(None, ddp_comm_hook(communicator))
    for step in range(4):
        if step == 2 and communicator.rank == int(victim):
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            ddp(torch.ones(4, 16)).sum().backward()
        except RuntimeError as error:
            print(f"noticed after {time.monotonic() - start:.1f} s: {str(error).splitlines()[0]}", flush=True)
            # rank 0 runs the store that the others read
            while communicator.rank == 0 and any(Path(f"/proc/{pid}").exists() for pid in others):
                time.sleep(0.05)
            return SURVIVED
    return 0


def main(mode: str, *arguments: str) -> int:
    """Run one mode."""
    torch.set_num_threads(1)
    return {"ddp": check_ddp, "shared-group": check_shared_group, "lose": lose_a_rank}[mode](*arguments)
