"""The sums of every algorithm, held against float64, and the bits that all ranks end with: part of ranks.py."""

import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable
from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.base import ALL_DTYPES
from bigbatch.comm.communicator import Communicator

LENGTHS = (0, 1, 3, 7, 1000, 100_003)
LONGEST = 3_000_001
"""Several of the ring's segments on each of 8 ranks, and parts that are handed on one by one inside a node."""

NARROW = (
    Wire(torch.float16),
    Wire(torch.float16, predivide=4.0),
    Wire(torch.bfloat16),
    Wire(torch.bfloat16, predivide=3.0),
    Wire(torch.bfloat16, predivide=3.0, in_fp32=False),
)
TABLE = HybridTable((HybridRow(4096, "doubling"), HybridRow(500_000, "hierarchical"), HybridRow(None, "sharded")))


@dataclass(frozen=True)
class Case:
    """One sum; is_shared: the tensor lies in allocate()d memory, behind others."""

    num_elements: int
    dtype: torch.dtype
    wire: Wire = Wire()  # noqa: RUF009
    is_shared: bool = True

    def __str__(self) -> str:
        wire = f" over {self.wire}" if self.wire.dtype else ""
        return f"{self.num_elements} x {self.dtype}{wire}, {'in' if self.is_shared else 'out of'} shared memory"


def cases() -> Iterator[Case]:
    """Every length and dtype as it is; tensors that lie elsewhere; tensors over a narrower wire."""
    for dtype in ALL_DTYPES:
        yield from (Case(num_elements, dtype) for num_elements in LENGTHS)
    yield from (Case(LONGEST, torch.float32, wire) for wire in (Wire(), NARROW[1]))
    yield from (Case(num_elements, torch.float32, is_shared=False) for num_elements in LENGTHS)
    yield from (Case(1000, dtype, is_shared=False) for dtype in ALL_DTYPES)
    for wire in NARROW:
        yield from (Case(num_elements, torch.float32, wire) for num_elements in (1, 3, 100_003))
        yield Case(1000, torch.float64, wire)
    yield Case(1000, torch.float64, Wire(torch.float32, predivide=2.0))
    yield Case(1000, torch.float16, Wire(torch.bfloat16, predivide=2.0))  # of one width: travels as it is
    yield from (Case(1000, dtype, Wire(in_fp32=False)) for dtype in (torch.float16, torch.bfloat16))
    yield Case(100_003, torch.float32, NARROW[1], is_shared=False)


def check_sums(communicator: Communicator, *, longest: int) -> None:
    """Each algorithm and case: rank 0 against the bound, and the others, law 4, against the bits of rank 0."""
    bits: list[str] = []
    homes = {dtype: communicator.allocate(longest + 5, dtype) for dtype in ALL_DTYPES}  # pages not used cost nothing
    some = [case for case in cases() if case.num_elements <= longest]
    for name in (*communicator.transport.algorithms, "hybrid"):
        for wire in dict.fromkeys(case.wire for case in some):  # in the same order on all ranks
            summing = communicator.with_algorithm(name, wire=wire, table=TABLE if name == "hybrid" else None)
            for case in (case for case in some if case.wire == wire):
                tensor_N = values(case.num_elements, case.dtype, rank=communicator.rank)
                if case.is_shared:
                    tensor_N = homes[case.dtype][5 : 5 + case.num_elements].copy_(tensor_N)
                label = f"{communicator.transport.backend.name} {name}: {case}"
                summing.sum_(tensor_N, label=label)
                bits.append(f"{label}: {zlib.crc32(as_bytes(tensor_N))}")
                if communicator.rank == 0:
                    check_sum(tensor_N, case, num_ranks=communicator.world_size, label=label)
        check_overflow(communicator, name)
    communicator.agree("the bits of a sum", "\n".join(bits))
    for home_N in homes.values():
        communicator.transport.release(home_N)


def check_overflow(communicator: Communicator, name: str) -> None:
    """Partial sums beyond 65,504 overflow fp16, but not divided by the number of ranks."""
    n = communicator.world_size
    for predivide, expected in ((1.0, float("inf") if n > 1 else 40_000.0), (float(n), 40_000.0 * n)):
        wire = Wire(torch.float16, predivide)
        summing = communicator.with_algorithm(name, wire=wire, table=TABLE if name == "hybrid" else None)
        sum_N = summing.sum_(torch.full((100,), 40_000.0), label=f"{name} near fp16's limit, predivide {predivide}")
        torch.testing.assert_close(sum_N, torch.full((100,), expected), rtol=n * 2.0**-11, atol=0.0)


def check_several_at_once(communicator: Communicator) -> None:
    """Sums that are started before the one ahead is waited for, each longer than the last, shared memory or not."""
    lengths = (10, 100_003, 400_001)
    for is_shared in (True, False):
        tensors = [values(length, torch.float32, rank=communicator.rank) for length in lengths]
        if is_shared:
            tensors = [communicator.allocate(len(t), torch.float32).copy_(t) for t in tensors]
        works = [communicator.start(tensor_N, label=f"{len(tensor_N)} elements") for tensor_N in tensors]
        for work in works:
            work.wait()
        for tensor_N in tensors:
            case = Case(len(tensor_N), torch.float32, is_shared=is_shared)
            check_sum(tensor_N, case, num_ranks=communicator.world_size, label=f"several at once, {case}")


@cache
def whole_random(num_elements: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + num_elements)
    return torch.randn(num_elements, dtype=torch.float64, generator=generator, device="cpu")


def values(num_elements: int, dtype: torch.dtype, *, rank: int) -> Tensor:
    """What a rank brings to a sum, on torch's default device; any rank can compute any other's part."""
    scale = 1.0 if dtype.is_floating_point else 2.0**50  # integers as Grid makes them
    return torch.empty(num_elements, dtype=dtype).copy_(whole_random(num_elements, rank) * scale)


@cache
def reference(num_elements: int, dtype: torch.dtype, num_ranks: int) -> tuple[Tensor, Tensor]:
    """The sum over all ranks in float64, and the sum of magnitudes."""
    total_N, magnitude_N = torch.zeros(2, num_elements, dtype=torch.float64)
    for rank in range(num_ranks):
        part_N = values(num_elements, dtype, rank=rank).double()
        total_N += part_N
        magnitude_N += part_N.abs()
    return total_N, magnitude_N


def check_sum(sum_N: Tensor, case: Case, *, num_ranks: int, label: str) -> None:
    """Whether each element is within n roundings of its own precision, and n of the wire's, of the float64 sum.

    A rounding is of a partial sum no larger than the sum of magnitudes, by half an eps of that; below fp16's normal
    range, by half its smallest value, which predivide then multiplies. The factor itself takes 3 roundings more.
    A value that came over a narrower wire must be one of those that the wire can carry. Integers add up exactly.
    """
    if not case.dtype.is_floating_point:
        parts = [values(case.num_elements, case.dtype, rank=rank) for rank in range(num_ranks)]
        assert torch.equal(sum_N, torch.stack(parts).sum(0)), f"{label}: integers do not add up"
        return
    total_N, magnitude_N = reference(case.num_elements, case.dtype, num_ranks)
    wire_dtype = case.wire.of(sum_N)
    own, wire = torch.finfo(case.dtype), torch.finfo(wire_dtype)
    roundings = num_ranks * (own.eps + torch.finfo(torch.float64).eps) / 2
    least = 0.0
    if wire_dtype != case.dtype:
        roundings += (num_ranks * wire.eps + 3 * own.eps) / 2
        least = num_ranks * wire.tiny * wire.eps / 2 * case.wire.predivide
        carried_N = (sum_N / case.wire.predivide).to(wire_dtype).to(case.dtype).mul_(case.wire.predivide)
        assert torch.equal(carried_N, sum_N), f"{label}: {wire_dtype} cannot carry what came"
    error_N = (sum_N.double() - total_N).abs()
    bound_N = math.expm1(roundings) * magnitude_N + least
    is_wrong_N = ~(error_N <= bound_N)
    assert not is_wrong_N.any(), (
        f"{label}: {int(is_wrong_N.sum())} elements beyond their bound, the first at {int(is_wrong_N.nonzero()[0])}; "
        f"error {error_N.max()}"
    )


def as_bytes(tensor: Tensor) -> memoryview:
    """The bits of a tensor."""
    return memoryview(tensor.contiguous().flatten().view(torch.uint8).cpu().numpy())
