"""The contract of communication, for ranks of every kind: processes and threads, on CPUs and GPUs: part of ranks.py.

NCCL's is held by real GPUs (tests/gpu/test_comm.py), as many as there are, and everywhere else by gloo that plays it.
"""

import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import over_nccl
from played_gpus import PlayedGpus
from played_nccl import PlayedNccl
from ranks_norm import check_norm
from ranks_reducer import check_gradients, check_uneven_use
from ranks_sums import LONGEST, Case, as_bytes, check_several_at_once, check_sum, check_sums, values
from ranks_transport import check_transport
from recorded_graph import RecordedCapture
from torch import Tensor

from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connection import connect
from bigbatch.comm.gradients.scatter_gather import ScatterGather
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.trainer.step.execution import CudaCapture

PLAYED_NCCL = "nccl-by-gloo"


def connect_to_check(env: ProcessEnv, backend: str, *, group_size: int | None) -> Communicator:
    """Connect over a backend of connect(), over NCCL also one rank alone, or over gloo that plays NCCL."""
    if backend == PLAYED_NCCL:
        patch = pytest.MonkeyPatch()  # until this process ends
        PlayedGpus(1, monkeypatch=patch)
        PlayedNccl(patch, carrier="gloo")
        gpu = torch.device("cuda", 0)
        communicator = connect(env=env, backend="nccl", device=gpu, group_size=group_size)
        over = over_nccl(communicator) if env.world_size == 1 else communicator
        return replace(over, device=torch.device("cpu"))  # where its tensors are
    torch.backends.cudnn.allow_tf32 = False  # as training in fp32 has it
    communicator = connect(env=env, backend=backend, group_size=group_size)
    return over_nccl(communicator) if (backend, env.world_size) == ("nccl", 1) else communicator


def check_contract(communicator: Communicator, *, longest: int = LONGEST, records: bool = True) -> None:
    """Make all checks, on the communicator's device; longest: of the sums of each algorithm, in elements.

    records: also what records a step. Ranks that are threads cannot: where several record at once, torch ends now and
    then with a segmentation fault in a receive.
    """
    checks: dict[str, Callable[[Communicator], None]] = {
        "transport": check_transport,
        "sums": partial(check_sums, longest=longest),
        "several at once": check_several_at_once,
        "halves": check_halves,
        "gradients": check_gradients,
        "uneven use": check_uneven_use,
        "norm": check_norm,
        "groups": check_groups_are_kept,
        "stream": check_stream_order,
    }
    if records:
        checks["capture"] = check_capture
    for name, check in checks.items():
        started = time.monotonic()
        with communicator.device:  # of all that checks make
            check(communicator)
        if communicator.rank == 0:
            print(f"{communicator.backend.name}: {name} took {time.monotonic() - started:.1f} s")


def check_halves(communicator: Communicator) -> None:
    """Reduce-scatter and all-gather, in place, of every dtype: parts of one element, and of a prime number of them."""
    n, halves = communicator.world_size, ScatterGather(communicator)
    for dtype in communicator.backend.capabilities.dtypes:
        for num_elements in (n, 1009 * n):
            case, label = Case(num_elements, dtype), f"halves of {num_elements} x {dtype}"
            buffer_N = communicator.allocate(num_elements, dtype)
            buffer_N.copy_(values(num_elements, dtype, rank=communicator.rank))
            halves.start_reduce_scatter(buffer_N, label=label).wait()
            halves.all_gather_(buffer_N, label=label)
            check_sum(buffer_N, case, num_ranks=n, label=label)
            communicator.agree(f"the bits of {label}", str(zlib.crc32(as_bytes(buffer_N))))
            communicator.release(buffer_N)


def check_groups_are_kept(communicator: Communicator) -> None:
    """Process groups of the same ranks are made once."""
    if not isinstance(communicator.backend, TorchDistributedBackend):
        return
    n, counts = communicator.world_size, []
    for _ in range(3):
        communicator.backend.new_group([list(range(k, n, 2)) for k in range(min(n, 2))])
        for name in communicator.algorithms:
            summing = communicator.with_algorithm(name, wire=Wire(torch.float16))
            assert summing.sum_(torch.ones(5), label=name).tolist() == [float(n)] * 5
        counts.append(len(dist.distributed_c10d._world.pg_map))
    assert len(set(counts)) == 1, counts


def check_stream_order(communicator: Communicator) -> None:
    """A sum begins behind what the GPU has been given, and what the GPU is given after wait() comes behind the sum."""
    if communicator.backend.name != "nccl":
        return
    n = communicator.world_size
    tensor_N = torch.zeros(1000)
    if tensor_N.is_cuda:
        torch.cuda._sleep(100_000_000)
    tensor_N.fill_(communicator.rank + 1)
    communicator.start(tensor_N, label="behind a late kernel").wait()
    assert tensor_N.mul(2).tolist() == [float(n * (n + 1))] * 1000
    until = time.monotonic() + 10
    while communicator.backend.oldest() is not None:  # the GPU's last number may come a moment after
        assert time.monotonic() < until
        time.sleep(0.01)


def check_capture(communicator: Communicator) -> None:
    """A captured sum is made by each replay, of what is there then; whole numbers, so that it is exact."""
    if communicator.backend.name != "nccl":
        return
    n, is_real = communicator.world_size, communicator.device.type == "cuda"
    capture = CudaCapture(communicator.device) if is_real else RecordedCapture()
    for name in communicator.algorithms:
        for wire in (Wire(), Wire(torch.bfloat16)):
            summing = communicator.with_algorithm(name, wire=wire)
            given_N, sum_N = torch.zeros(2, 1003)

            def work(
                summing: Communicator = summing, given_N: Tensor = given_N, sum_N: Tensor = sum_N, label: str = name
            ) -> Tensor:
                return summing.sum_(sum_N.copy_(given_N), label=label)

            capture.warm_up(work)
            (replay,), _ = capture(lambda cut, work=work: work())
            for seed in (1, 2):
                given_N.copy_(torch.arange(1003) % 7 + seed * communicator.rank)
                replay()
                expected_N = torch.arange(1003) % 7 * n + seed * n * (n - 1) // 2
                assert torch.equal(sum_N, expected_N.float()), f"{name} over {wire}"
