"""What every rank of a test job runs: `ranks.py MODE [ARGUMENT ...]`, started by mpirun, torchrun or by hand.

A rank that finds something wrong prints a traceback and ends at once, so that the launcher ends the job.
"""

import hashlib
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from bigbatch.comm.algorithms import make_allreduce
from bigbatch.comm.backends import in_flight, torch_distributed
from bigbatch.comm.backends.base import CommError, Group, PeerLostError
from bigbatch.comm.communicator import Communicator, connect
from bigbatch.comm.reducer import GradientReducer
from bigbatch.comm.topology import make_topology

LENGTHS = (0, 1, 3, 7, 1000, 100_003)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SURVIVED = 7
"""Exit code of a rank that noticed the loss of another one."""


def main(mode: str, *arguments: str) -> int:
    """Run one mode; the exit code."""
    torch.set_num_threads(1)
    return {"check": check_backends, "lose": lose_a_rank, "stall": stall_under_mpi}[mode](*arguments)


# --- checks in which all ranks live ---


def check_backends(*backends: str) -> int:
    """All checks on each backend, in one job: starting ranks costs more than the checks."""
    connected = [connect(backend=backend, timeout_seconds=60) for backend in backends]
    for communicator in connected:
        for check in (check_transport, check_algorithms, check_agree, check_gradients, check_uneven_use):
            check(communicator)
    check_listeners(connected[0])
    for communicator in connected[1:]:
        communicator.backend.close()
    for communicator in connected:  # the first one may finalize MPI; closing twice does no harm
        communicator.close()
    print(f"rank {connected[0].rank}: all checks passed", flush=True)
    return 0


@cache
def values(num_elements: int, dtype: torch.dtype, *, rank: int) -> Tensor:
    """What a rank brings to a sum (not to be written to); any rank can compute any other's part."""
    generator = torch.Generator().manual_seed(1000 * rank + num_elements)
    return torch.randn(num_elements, dtype=torch.float64, generator=generator).to(dtype)


def digest(tensor: Tensor) -> str:
    """The bits of a tensor, in short."""
    return hashlib.sha256(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def check_transport(communicator: Communicator) -> None:
    """The transfers of a backend, on the world and on a group that does not start with rank 0."""
    backend, n, rank = communicator.backend, communicator.world_size, communicator.rank
    assert (rank, n) == (communicator.env.rank, communicator.env.world_size)
    assert backend.all_gather_text(f"text of {rank}") == [f"text of {r}" for r in range(n)]
    pair = backend.new_group([[0], list(range(1, n))])
    for group in (backend.world, pair):
        check_group(communicator, group)
    ring = torch.tensor([float(rank)]), torch.zeros(1)
    backend.exchange(send=ring[0], to=(rank + 1) % n, receive=ring[1], source=(rank - 1) % n)
    assert ring[1].item() == (rank - 1) % n


def check_group(communicator: Communicator, group: Group) -> None:
    """Whole numbers, so that every sum is exact in every dtype."""
    backend, k = communicator.backend, len(group.ranks)
    place = group.ranks.index(communicator.rank)
    for dtype in DTYPES:
        mine_N = torch.full((2 * k,), float(place + 1), dtype=dtype)
        total = k * (k + 1) / 2
        first_N = mine_N.clone()
        backend.reduce_(first_N, group)
        if place == 0:
            assert first_N.tolist() == [total] * (2 * k)
        sent_N = mine_N.clone()
        backend.broadcast_(sent_N, group)
        assert sent_N.tolist() == [1.0] * (2 * k)
        sum_N = mine_N.clone()
        backend.all_reduce_(sum_N, group)
        assert sum_N.tolist() == [total] * (2 * k)
        shard_2 = torch.zeros(2, dtype=dtype)
        backend.reduce_scatter(shard_2, torch.arange(2 * k, dtype=dtype), group)
        assert shard_2.tolist() == [2.0 * place * k, (2.0 * place + 1) * k]
        whole_N = torch.zeros(2 * k, dtype=dtype)
        backend.all_gather(whole_N, mine_N[:2], group)
        assert whole_N.tolist() == [float(r // 2 + 1) for r in range(2 * k)]


def check_algorithms(communicator: Communicator) -> None:
    """Every algorithm, grouping, length and dtype against a float64 sum; and law 4: identical bits."""
    bits: list[str] = []
    for name, all_reduce_ in algorithms(communicator):
        for dtype in DTYPES:
            for num_elements in LENGTHS:
                tensor_N = values(num_elements, dtype, rank=communicator.rank).clone()
                case = f"{communicator.backend.name} {name} {dtype} {num_elements}"
                communicator.backend.submit(lambda: all_reduce_(tensor_N), label=case).wait()  # noqa: B023
                check_sum(tensor_N, communicator.world_size, case=case)
                bits.append(f"{case}: {digest(tensor_N)}")
    communicator.agree("the bits of a sum", "\n".join(bits))


def algorithms(communicator: Communicator) -> list[tuple[str, Callable[[Tensor], None]]]:
    """All algorithms over all groupings of these ranks on which they are defined, cyclic placement included."""
    backend, n = communicator.backend, communicator.world_size
    one_host, alternating = ["a"] * n, ["ab"[rank % 2] for rank in range(n)]
    found = []
    for hosts, group_size in ((one_host, None), (one_host, 1), (one_host, 2), (alternating, None)):
        topology = make_topology(hosts, rank=communicator.rank, group_size=group_size)
        for name in ("native", "ring", "hierarchical", "sharded"):
            if name in ("native", "ring") and group_size:
                continue  # they know no groups
            if name == "sharded" and not topology.is_even:
                with pytest.raises(ValueError, match="no equal columns; use algorithm 'hierarchical'"):
                    make_allreduce(name, backend=backend, topology=topology)
                continue
            all_reduce_ = make_allreduce(name, backend=backend, topology=topology)
            found.append((f"{name} over {topology.groups}", all_reduce_))
    return found


def check_sum(sum_N: Tensor, num_ranks: int, *, case: str) -> None:
    """At most n roundings of relative size eps / 2 each, of partial sums no larger than the sum of magnitudes.

    The float64 sum that it is held against makes as many of its own.
    """
    parts_RN = torch.stack([values(sum_N.numel(), sum_N.dtype, rank=rank).double() for rank in range(num_ranks)])
    roundings = num_ranks * (torch.finfo(sum_N.dtype).eps + torch.finfo(torch.float64).eps) / 2
    bound_N = roundings * parts_RN.abs().sum(0)
    error_N = (sum_N.double() - parts_RN.sum(0)).abs()
    assert bool((error_N <= bound_N).all()), f"{case}: error {error_N.max()} exceeds its bound"


def check_agree(communicator: Communicator) -> None:
    """Equal texts pass; unequal ones name the odd rank and the line, on all ranks."""
    communicator.agree("the config", "seed: 1\nlr: 2")
    expected = "rank 1 and rank 0 disagree on the config: 'lr: 3' against 'lr: 2'; start all ranks from the same"
    with pytest.raises(CommError, match=expected):
        communicator.agree("the config", f"seed: 1\nlr: {3 if communicator.rank == 1 else 2}")


def make_model() -> nn.Sequential:
    """The same on every rank: a channels-last convolution and two linear layers, in float64."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, 5), nn.Linear(5, 3)
    )
    return model.double().to(memory_format=torch.channels_last)


def loss_of(model: nn.Module, images_BCHW: Tensor, *, num_images: int) -> Tensor:
    """A mean over the global batch, of which images_BCHW is a part."""
    return model(images_BCHW).square().sum() / num_images


def check_gradients(communicator: Communicator) -> None:
    """Law 1 for the reducer: any split over ranks and microbatches gives the whole batch's gradient."""
    images_BCHW = torch.randn(24, 3, 5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    whole = make_model()
    loss_of(whole, images_BCHW, num_images=24).backward()
    mine_BCHW = images_BCHW.tensor_split(communicator.world_size)[communicator.rank]
    model = make_model()
    reducer = GradientReducer(model.named_parameters(), communicator, threshold_bytes=1000, buffer_bytes=1100)
    assert len(reducer.buffers) > 2
    for num_microbatches in (1, 2, 3):
        ranks_1 = torch.ones(1)
        for k, part_BCHW in enumerate(mine_BCHW.tensor_split(num_microbatches)):
            reducer.is_active = k == num_microbatches - 1
            loss = loss_of(model, part_BCHW, num_images=24)
            if reducer.is_active:
                reducer.start_extra(ranks_1, label="an extra tensor")
            loss.backward()
        reducer.wait()
        assert ranks_1.item() == communicator.world_size
        for ours, reference in zip(model.parameters(), whole.parameters(), strict=True):
            assert ours.grad is not None
            assert ours.grad.stride() == ours.stride()
            torch.testing.assert_close(ours.grad, reference.grad, rtol=1e-11, atol=1e-13)
        communicator.agree("the gradients", "\n".join(digest(buffer_N) for buffer_N in reducer.buffers))
        reducer.zero_grad()


def check_uneven_use(communicator: Communicator) -> None:
    """A layer that only rank 0 uses: the others count as zero, and no rank waits for another's order."""
    model = nn.ModuleList([nn.Linear(2, 2, bias=False) for _ in range(3)]).double()
    nn.init.ones_(model[0].weight)
    nn.init.ones_(model[1].weight)
    reducer = GradientReducer(model.named_parameters(), communicator, threshold_bytes=1, buffer_bytes=1)
    hidden_BC = model[0](torch.ones(1, 2, dtype=torch.float64))
    if communicator.rank == 0:
        hidden_BC = model[1](hidden_BC)
    hidden_BC.sum().backward()
    reducer.wait()
    n = communicator.world_size
    # d/dW0 is 2 for rank 0, whose output passes two ones, and 1 for the others; d/dW1 is its input, 2
    expected = [[2.0 + n - 1] * 4, [2.0] * 4, [0.0] * 4]
    assert [layer.weight.grad.flatten().tolist() for layer in model] == expected


def check_listeners(communicator: Communicator) -> None:
    """On one host nothing of ours listens beyond the loopback interface (Open MPI's own sockets are its business)."""
    if communicator.env.launcher == "torchrun" and communicator.env.is_one_host:
        assert_only_loopback()


def assert_only_loopback() -> None:
    """Look at this process's own listening sockets, IPv4 and IPv6."""
    if not Path("/proc/net/tcp").exists():
        return
    own = {os.readlink(fd) for fd in Path("/proc/self/fd").iterdir() if fd.exists() or fd.is_symlink()}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:] if Path(table).exists() else []:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found.append(fields[1].split(":")[0])
    assert found, "gloo listens, so at least one socket was expected"
    loopback = {"0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
    assert set(found) <= loopback, f"listens on {found}"


# --- jobs in which a rank is lost ---


def lose_a_rank(algorithm: str, victim: str, how: str, timeout_seconds: str) -> int:
    """Sum until one rank is killed or stopped between two sums; the others must notice, and say who."""
    in_flight.POLL_SECONDS = 0.3
    torch_distributed.ROLL_CALL_SECONDS = 3.0
    communicator = connect(backend="gloo", algorithm=algorithm, group_size=2, timeout_seconds=float(timeout_seconds))
    assert_only_loopback()
    start = 0.0
    try:
        for step in range(4):
            start = time.monotonic()
            if step == 2 and communicator.rank == int(victim):
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
            works = [communicator.start(torch.ones(1000), label=f"buffer {i} of step {step}") for i in range(3)]
            for work in works:
                work.wait()
    except PeerLostError as error:
        print(f"noticed after {time.monotonic() - start:.1f} s: {error}", flush=True)
        return SURVIVED
    return 0


def stall_under_mpi() -> int:
    """Rank 1 never comes; rank 0 gives up, and its plain end of Python ends the job although MPI still hangs."""
    communicator = connect(backend="mpi", timeout_seconds=2)
    if communicator.rank == 1:
        time.sleep(600)
    communicator.sum_(torch.ones(10), label="buffer 0")
    return 0


if __name__ == "__main__":
    if sys.argv[1] == "stall":
        sys.exit(main(*sys.argv[1:]))
    try:
        code = main(*sys.argv[1:])
    except BaseException:
        print(f"a rank on {socket.gethostname()}, process {os.getpid()}, failed:", file=sys.stderr)
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # as bigbatch's own command ends a rank
