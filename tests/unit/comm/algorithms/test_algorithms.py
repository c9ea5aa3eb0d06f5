"""All-reduce algorithms over ranks that are threads: what they send, in which precision, and what they refuse."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from one_rank import transport_over
from thread_ranks import Post, PostBackend, sum_by_threads
from torch import Tensor

from bigbatch.comm.algorithms import ring
from bigbatch.comm.algorithms.by_name import make_allreduce
from bigbatch.comm.algorithms.doubling import doubling_allreduce_
from bigbatch.comm.algorithms.ring import HOPS_AT_ONCE, SEGMENT_BYTES, ring_allreduce_, ring_order
from bigbatch.comm.algorithms.shared import ShardAssignment, shared_allreduce_
from bigbatch.comm.algorithms.wire import Staging, Wire
from bigbatch.comm.backends.base import Capabilities, Group, InFlight
from bigbatch.comm.backends.single import SingleBackend
from bigbatch.comm.communicator import make_communicator
from bigbatch.comm.gradients.scatter_gather import ScatterGather
from bigbatch.comm.rendezvous.topology import make_topology

FP64, FP32, FP16, BF16 = torch.float64, torch.float32, torch.float16, torch.bfloat16


def numbers(num_ranks: int, num_elements: int, dtype: torch.dtype = FP32) -> list[Tensor]:
    return [torch.arange(num_elements).remainder(7).add(rank).to(dtype) for rank in range(num_ranks)]


# --- what is sent ---


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("wire", [Wire(), Wire(FP16), Wire(FP16, in_fp32=False)])
def test_ring_sends_no_more_than_it_must(num_ranks: int, wire: Wire) -> None:
    num_elements = 840 * 3  # divides by every number of ranks
    tensors = numbers(num_ranks, num_elements)
    expected_N = torch.stack(tensors).sum(0)
    post = sum_by_threads(ring_allreduce_, tensors, wire=wire)
    for tensor_N in tensors:
        assert torch.equal(tensor_N, expected_N)
    width = 2 if wire.dtype else 4
    for rank in range(num_ranks):
        sent = {to: n for (source, to), n in post.num_bytes.items() if source == rank}
        least = 2 * num_elements * width * (num_ranks - 1) // num_ranks
        assert sum(sent.values()) == least
        if not wire.sums_in_fp32(tensors[rank]):
            assert set(sent) == ({(rank + 1) % num_ranks} if least else set())
        assert sum(n for (source, _), n in post.messages.items() if source == rank) == 2 * (num_ranks - 1)


@pytest.mark.parametrize("num_ranks", [2, 5])
def test_ring_announces_each_part_once_when_it_is_final(num_ranks: int) -> None:
    tensors, announced = numbers(num_ranks, 100), [list[int]() for _ in range(num_ranks)]
    expected = torch.stack(tensors).sum(0).tensor_split(num_ranks)
    post, ranks = Post(), tuple(range(num_ranks))

    def one(rank: int) -> None:
        def announce(part: int) -> None:
            assert torch.equal(tensors[rank].tensor_split(num_ranks)[part], expected[part])
            announced[rank].append(part)

        backend = PostBackend(rank, post)
        ring_allreduce_(tensors[rank], backend, ranks, wire=Wire(), staging=Staging(), announce=announce)

    with ThreadPoolExecutor(num_ranks) as pool:
        list(pool.map(one, ranks))
    assert [tuple(parts) for parts in announced] == [ring_order(num_ranks, rank) for rank in range(num_ranks)]


@pytest.mark.parametrize(("num_ranks", "hops"), [(1, 0), (2, 1), (3, 2), (4, 2), (7, 3), (8, 3)])
def test_doubling_takes_the_logarithm_of_the_ranks_in_hops(num_ranks: int, hops: int) -> None:
    tensors = numbers(num_ranks, 10)
    expected_N = torch.stack(tensors).sum(0)
    post = sum_by_threads(doubling_allreduce_, tensors, wire=Wire())
    for tensor_N in tensors:
        assert torch.equal(tensor_N, expected_N)
    sent = [sum(n for (source, _), n in post.messages.items() if source == rank) for rank in range(num_ranks)]
    assert max(sent) == hops
    assert set(post.num_bytes.values()) <= {40}


# --- precision ---


@pytest.mark.parametrize(
    ("wire", "dtype", "travels_as"),
    [
        (None, FP32, FP32),
        (FP16, FP64, FP64),  # counts and losses
        (FP16, FP32, FP16),
        (FP32, FP64, FP64),
        (FP32, FP32, FP32),
        (FP32, BF16, BF16),  # never wider than its own
        (BF16, FP16, FP16),  # nor another of its width
    ],
)
def test_wire_precision_in_which_a_tensor_travels(
    wire: torch.dtype | None, dtype: torch.dtype, travels_as: torch.dtype
) -> None:
    assert Wire(wire).of(torch.zeros(1, dtype=dtype)) == travels_as


def test_wire_in_half_precision_is_summed_in_fp32_and_rounded_once() -> None:
    own_S = torch.tensor([2048.0], dtype=FP16)  # where fp16 counts in steps of two
    ones = [torch.ones(1, dtype=FP16)] * 3
    Wire().add_(own_S, ones)
    assert own_S.item() == 2052.0  # 2051, rounded; one by one each 2049 would have gone back to 2048


@pytest.mark.parametrize("wire", [Wire(FP16), Wire(BF16, predivide=3.0)])
@pytest.mark.parametrize("algorithm", [ring_allreduce_, doubling_allreduce_])
@pytest.mark.parametrize("num_ranks", [1, 3, 8])
@pytest.mark.parametrize("num_elements", [1, 1001])
def test_wire_with_sums_in_fp32_rounds_each_share_and_the_sum_once(
    algorithm: Callable[..., None], num_ranks: int, num_elements: int, wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ring, "SEGMENT_BYTES", 64)
    assert wire.dtype is not None
    for dtype in (FP32, wire.dtype):
        generator = torch.Generator().manual_seed(num_ranks)
        tensors = [(1 + torch.rand(num_elements, generator=generator)).to(dtype) for _ in range(num_ranks + 1)]
        *tensors, other_N = tensors
        exact_N = torch.stack([*tensors, *[other_N] * num_ranks]).double().sum(0)
        sum_by_threads(algorithm, tensors, wire=wire, others=[other_N])
        # half an eps for each rounding of a value, all of one sign; and those of fp32, which are few
        bound = torch.finfo(wire.dtype).eps + (3 * num_ranks + 3) * torch.finfo(FP32).eps
        assert float(((tensors[0].double() - exact_N) / exact_N).abs().max()) <= bound
        assert all(torch.equal(tensor_N, tensors[0]) for tensor_N in tensors)


class LoggingBackend(SingleBackend):
    """The first of some ranks, each of which adds its number; records what it starts and what it waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []

    def start_exchange(self, *, send: Tensor, to: int, receive: Tensor, source: int) -> InFlight:
        name = f"{sum(line.startswith('start') and line.endswith(f'to {to}') for line in self.log)} to {to}"
        self.log.append(f"start number {name}")
        receive.fill_(source)
        return SimpleNamespace(wait=lambda: self.log.append(f"wait for number {name}"))


def test_wire_with_sums_in_fp32_sends_a_segment_on_before_it_waits_for_the_next() -> None:
    """A part has two segments; rank 1 gets this rank's share of its own part first, then the sum of this rank's."""
    backend, num_elements = LoggingBackend(), 3 * 2 * SEGMENT_BYTES // 2
    ring_allreduce_(torch.ones(num_elements, dtype=BF16), backend, (0, 1, 2), wire=Wire(), staging=Staging())
    log = backend.log
    assert [log.index(f"start number {number} to 1") for number in (0, 1)] == [0, 1]
    assert log.index("start number 2 to 1") < log.index("wait for number 1 to 2")


@pytest.mark.parametrize("num_ranks", [2, HOPS_AT_ONCE, HOPS_AT_ONCE + 1, 2 * HOPS_AT_ONCE + 3])
def test_wire_with_sums_in_fp32_has_shares_of_several_ranks_under_way_and_adds_each_once(num_ranks: int) -> None:
    """A late rank delays its own share alone. The first rank sums the second part."""
    backend, own_N = LoggingBackend(), torch.ones(num_ranks * 3, dtype=BF16)
    ring_allreduce_(own_N, backend, range(num_ranks), wire=Wire(), staging=Staging())
    first_wait = next(at for at, line in enumerate(backend.log) if line.startswith("wait"))
    assert first_wait == min(num_ranks - 1, HOPS_AT_ONCE)
    assert own_N[3:6].tolist() == [1.0 + sum(range(num_ranks))] * 3


class RoundingBackend(SingleBackend):
    """Stands for a library that sums in the tensors' own precision: adds twice 1 to each value, one by one."""

    capabilities = Capabilities(("cpu",), sums_half_in_fp32=False)

    def all_reduce_(self, tensor_N: Tensor, group: Group) -> None:
        tensor_N.add_(1).add_(1)

    def reduce_(self, tensor_N: Tensor, group: Group, *, root: int) -> None:
        self.all_reduce_(tensor_N, group)

    def reduce_scatter(self, shard_M: Tensor, tensor_N: Tensor, group: Group) -> None:
        self.all_reduce_(shard_M.copy_(tensor_N), group)


@pytest.mark.parametrize(("in_fp32", "sum_"), [(True, 258.0), (False, 256.0)])
@pytest.mark.parametrize("name", ["native", "hierarchical", "sharded", "doubling", "reduce_scatter"])
def test_wire_with_sums_in_fp32_gives_fp32_to_a_library_that_rounds_each_addition(
    name: str, in_fp32: bool, sum_: float
) -> None:
    wire, backend = Wire(in_fp32=in_fp32), RoundingBackend()
    alone = make_communicator(transport_over(backend), "native", wire=wire)

    def all_reduce_(tensor_N: Tensor) -> None:
        if name == "reduce_scatter":
            ScatterGather(alone).start_reduce_scatter(tensor_N, label="sum").wait()
        else:
            make_allreduce(name, backend=backend, topology=alone.connection.topology, wire=wire)(tensor_N)

    all_reduce_(half_N := torch.full((3,), 256.0, dtype=BF16))  # bf16 has no 257
    assert half_N.tolist() == [sum_] * 3
    all_reduce_(full_N := torch.full((3,), 256.0))
    assert full_N.tolist() == [258.0] * 3


def test_wire_with_sums_in_fp32_leaves_a_narrow_wire_to_libraries_that_sum_in_fp32() -> None:
    wire = Wire(BF16)
    topology = make_topology(["here"], rank=0)
    for backend, sum_ in ((SingleBackend(), 256.0), (RoundingBackend(), 260.0)):  # 259 in fp32
        make_allreduce("native", backend=backend, topology=topology, wire=wire)(own_N := torch.tensor([257.0]))
        assert own_N.tolist() == [sum_]


# --- what is refused ---


@pytest.mark.parametrize("tensor", [torch.zeros(2, 2), torch.zeros(4)[::2]])
@pytest.mark.parametrize("algorithm", [ring_allreduce_, doubling_allreduce_])
def test_ring_and_doubling_take_only_flat_tensors(algorithm: Callable[..., None], tensor: Tensor) -> None:
    with pytest.raises(ValueError, match=naming("contiguous", f"shape {tuple(tensor.shape)}")):
        algorithm(tensor, SingleBackend(), (0,), wire=Wire(), staging=Staging())


@pytest.mark.parametrize(
    ("tensor", "named"),
    [(torch.zeros(4), ("Communicator.allocate()",)), (torch.zeros(2, 2), ("contiguous", "shape (2, 2)"))],
)
def test_shared_allreduce_wants_shared_memory(tensor: Tensor, named: tuple[str, ...]) -> None:
    owners = ShardAssignment(1, lambda own_N, others, announce: None, (0,))
    elsewhere: Any = SimpleNamespace(views=lambda tensor_N: None)
    with pytest.raises(ValueError, match=naming(*named)):
        shared_allreduce_(tensor, backend=SingleBackend(), memory=elsewhere, node=(0,), owners=owners)
