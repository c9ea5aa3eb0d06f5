"""The contract of communication, for ranks of every kind: processes and threads, on CPUs and GPUs: part of ranks.py.

NCCL's is held by real GPUs (tests/gpu/test_comm.py), as many as there are, and everywhere else by gloo that plays it.
"""

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from gpu_ranks import over_nccl
from played_gpus import PlayedGpus
from played_nccl import PlayedNccl
from ranks_norm import check_norm
from ranks_orders import check_orders
from ranks_reducer import check_changed_gradients, check_gradients, check_other_operations, check_uneven_use
from ranks_sums import LONGEST, Case, as_bytes, check_several_at_once, check_sum, check_sums, values
from recorded_graph import RecordedCapture
from torch import Tensor

from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.base import ALL_DTYPES, Group, InFlight
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.connect import connect
from bigbatch.comm.gradients.scatter_gather import ScatterGather
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.errors import CommError
from bigbatch.trainer.step.cuda_graph import CudaCapture

PLAYED_NCCL = "nccl-by-gloo"


def connect_to_check(env: ProcessEnv, backend: str, *, group_size: int | None) -> Communicator:
    """Connect over a backend of connect(), over NCCL also one rank alone, or over gloo that plays NCCL."""
    if backend == PLAYED_NCCL:
        patch = pytest.MonkeyPatch()  # until this process ends
        PlayedGpus(1, monkeypatch=patch, uuids=[f"of rank {env.rank}"])
        PlayedNccl(patch, carrier="gloo")
        gpu = torch.device("cuda", 0)
        communicator = connect(env=env, backend="nccl", device=gpu, group_size=group_size)
        over = over_nccl(communicator) if env.world_size == 1 else communicator
        transport = replace(over.transport, device=torch.device("cpu"))  # where its tensors are
        return replace(over, transport=transport)
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
        "orders": partial(check_orders, seeds=range(3)),
        "changed gradients": check_changed_gradients,
        "other operations": check_other_operations,
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
            print(f"{communicator.transport.backend.name}: {name} took {time.monotonic() - started:.1f} s")


def check_halves(communicator: Communicator) -> None:
    """Reduce-scatter and all-gather, in place, of every dtype: parts of one element, and of a prime number of them."""
    n, halves = communicator.world_size, ScatterGather(communicator)
    for dtype in communicator.transport.backend.capabilities.dtypes:
        for num_elements in (n, 1009 * n):
            case, label = Case(num_elements, dtype), f"halves of {num_elements} x {dtype}"
            buffer_N = communicator.allocate(num_elements, dtype)
            buffer_N.copy_(values(num_elements, dtype, rank=communicator.rank))
            halves.start_reduce_scatter(buffer_N, label=label).wait()
            halves.all_gather_(buffer_N, label=label)
            check_sum(buffer_N, case, num_ranks=n, label=label)
            communicator.agree(f"the bits of {label}", str(zlib.crc32(as_bytes(buffer_N))))
            communicator.transport.release(buffer_N)


def check_groups_are_kept(communicator: Communicator) -> None:
    """Process groups of the same ranks are made once."""
    if not isinstance(communicator.transport.backend, TorchDistributedBackend):
        return
    n, counts = communicator.world_size, []
    for _ in range(3):
        communicator.transport.backend.new_group([list(range(k, n, 2)) for k in range(min(n, 2))])
        for name in communicator.transport.algorithms:
            summing = communicator.with_algorithm(name, wire=Wire(torch.float16))
            assert summing.sum_(torch.ones(5), label=name).tolist() == [float(n)] * 5
        counts.append(len(dist.distributed_c10d._world.pg_map))
    assert len(set(counts)) == 1, counts


def check_stream_order(communicator: Communicator) -> None:
    """A sum begins behind what the GPU has been given, and what the GPU is given after wait() comes behind the sum."""
    if communicator.transport.backend.name != "nccl":
        return
    n = communicator.world_size
    tensor_N = torch.zeros(1000)
    if tensor_N.is_cuda:
        torch.cuda._sleep(100_000_000)
    tensor_N.fill_(communicator.rank + 1)
    communicator.start(tensor_N, label="behind a late kernel").wait()
    assert tensor_N.mul(2).tolist() == [float(n * (n + 1))] * 1000
    until = time.monotonic() + 10
    while communicator.transport.backend.oldest() is not None:  # the GPU's last number may come a moment after
        assert time.monotonic() < until
        time.sleep(0.01)


def check_capture(communicator: Communicator) -> None:
    """A captured sum is made by each replay, of what is there then; whole numbers, so that it is exact."""
    if communicator.transport.backend.name != "nccl":
        return
    n, is_real = communicator.world_size, communicator.device.type == "cuda"
    capture = CudaCapture(communicator.device) if is_real else RecordedCapture()
    for name in communicator.transport.algorithms:
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


# --- a transport's, on whole numbers, so that every sum is exact ---


def check_transport(communicator: Communicator) -> None:
    """Identity, messages, and the collectives of the world and of smaller groups."""
    backend, n, rank = communicator.transport.backend, communicator.world_size, communicator.rank
    assert (rank, n) == (communicator.env.rank, communicator.env.world_size)
    assert backend.world.ranks == tuple(range(n))
    families = [[[0], list(range(1, n))], [list(range(0, n, 2)), list(range(1, n, 2))]]
    groups = [backend.world, *(backend.new_group([*filter(None, each)]) for each in families)]
    for group in groups:
        assert rank in group.ranks
        on_its_thread(communicator, lambda group=group: check_group(communicator, group), "collectives of a group")
    if backend.capabilities.has_messages and n > 1:
        on_its_thread(communicator, lambda: check_order(communicator), "messages in order")
        on_its_thread(communicator, lambda: check_exchange(communicator), "an exchange around the ring")
        if backend.name != "nccl":  # where all that send before they receive wait for each other
            on_its_thread(communicator, lambda: check_all_to_all(communicator), "messages between all")
    if backend.name in ("tcp", "mpi"):
        on_its_thread(communicator, lambda: check_half_sums(communicator), "sums of half precision")
    check_texts(communicator)


def on_its_thread(communicator: Communicator, operation: Callable[[], None], label: str) -> None:
    """Run an operation on the backend's own thread."""
    communicator.transport.backend.submit(operation, label=f"{communicator.transport.backend.name}: {label}").wait()


def check_group(communicator: Communicator, group: Group, dtypes: Sequence[torch.dtype] = ALL_DTYPES) -> None:
    """Collectives, with every rank of the group as the root; lengths that the group divides and one it does not."""
    backend, k = communicator.transport.backend, len(group.ranks)
    place = group.ranks.index(communicator.rank)
    total = float(k * (k + 1) / 2)
    for dtype in dtypes:
        for length in (1, 2 * k, 2 * k + 1):
            mine_N = torch.full((length,), float(place + 1), dtype=dtype)
            for root in group.ranks:
                first_N = mine_N.clone()
                backend.reduce_(first_N, group, root=root)
                if communicator.rank == root:
                    assert first_N.tolist() == [total] * length
                sent_N = mine_N.clone()
                backend.broadcast_(sent_N, group, root=root)
                assert sent_N.tolist() == [float(group.ranks.index(root) + 1)] * length
            sum_N = mine_N.clone()
            backend.all_reduce_(sum_N, group)
            assert sum_N.tolist() == [total] * length
        shard_2 = torch.zeros(2, dtype=dtype)
        backend.reduce_scatter(shard_2, torch.arange(2 * k, dtype=dtype), group)
        assert shard_2.tolist() == [2.0 * place * k, (2.0 * place + 1) * k]
        whole_N = torch.zeros(2 * k, dtype=dtype)
        backend.all_gather(whole_N, torch.full((2,), float(place + 1), dtype=dtype), group)
        assert whole_N.tolist() == [float(r // 2 + 1) for r in range(2 * k)]


def check_half_sums(communicator: Communicator) -> None:
    """Made in fp32 and rounded once: at 2048 fp16 counts in steps of two, so that ones added one by one are lost."""
    n, rank = communicator.world_size, communicator.rank
    sum_N = torch.full((2 * n,), 2048.0 if rank == 0 else 1.0, dtype=torch.float16)
    communicator.transport.backend.all_reduce_(sum_N, communicator.transport.backend.world)
    assert torch.equal(sum_N, torch.full((2 * n,), 2048.0 + n - 1).half())


def check_order(communicator: Communicator) -> None:
    """Messages to one rank arrive in the order in which they were started, short behind long, an empty one between."""
    backend, n, rank = communicator.transport.backend, communicator.world_size, communicator.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    lengths = (500_000, 1, 0, 7)
    received = [torch.zeros(length) for length in lengths]
    works: list[InFlight] = []

    def send() -> None:
        works.extend(backend.start_send(torch.full((m,), 10.0 * rank + k), to=right) for k, m in enumerate(lengths))

    def receive() -> None:
        works.extend(backend.start_receive(received_N, source=left) for received_N in received)

    # NCCL makes each message to its end before the next: not all ranks may send first
    for each in (receive, send) if backend.name == "nccl" and rank else (send, receive):
        each()
    for work in reversed(works):  # in any order, each once: gloo would wait forever for the second
        work.wait()
    for k, (received_N, length) in enumerate(zip(received, lengths, strict=True)):
        assert received_N.tolist() == [10.0 * left + k] * length


def check_exchange(communicator: Communicator) -> None:
    """All send at once, more than the kernel's buffers hold: no rank may wait for the other to receive first."""
    backend, n, rank = communicator.transport.backend, communicator.world_size, communicator.rank
    right, left = (rank + 1) % n, (rank - 1) % n
    for dtype in (*ALL_DTYPES, torch.uint8):
        for length in (0, 1, 1_000_000):
            sent_N, received_N = torch.full((length,), rank, dtype=dtype), torch.zeros(length, dtype=dtype)
            backend.start_exchange(send=sent_N, to=right, receive=received_N, source=left).wait()
            assert torch.equal(received_N, torch.full((length,), left, dtype=dtype))


def check_all_to_all(communicator: Communicator) -> None:
    """A message of its own length from every rank to every other, all under way at once."""
    backend, rank = communicator.transport.backend, communicator.rank
    others = [other for other in range(communicator.world_size) if other != rank]
    sends = [backend.start_send(torch.full((100 * rank + other,), rank), to=other) for other in others]
    received = {other: torch.zeros(100 * other + rank, dtype=torch.int64) for other in others}
    receives = [backend.start_receive(received_N, source=other) for other, received_N in received.items()]
    InFlight(*(each.wait for each in (*receives, *sends))).wait()
    for other, received_N in received.items():
        assert torch.equal(received_N, torch.full_like(received_N, other))


def check_texts(communicator: Communicator) -> None:
    """Texts of all ranks in rank order; equal ones pass; unequal ones name the odd rank and the line, on all ranks."""
    n, rank = communicator.world_size, communicator.rank
    assert communicator.connection.control.gather_text(f"text of {rank}") == [f"text of {r}" for r in range(n)]
    assert communicator.connection.control.gather_text("") == [""] * n
    assert communicator.gather((rank, "\udcff")) == [[r, "\udcff"] for r in range(n)]  # a path may not be UTF-8
    assert communicator.connection.control.host_of(n - 1) == communicator.gather(communicator.env.host)[-1]
    communicator.agree("the config", "seed: 1\nlr: 2")
    if n == 1:
        return
    with pytest.raises(CommError, match=r"rank 1 and rank 0 .*the config.*'lr: 3' .*'lr: 2'"):
        communicator.agree("the config", f"seed: 1\nlr: {3 if rank == 1 else 2}")
