"""What a sum over many ranks loses to rounding, against float64: by algorithm, precision and comm.reduce_dtype.

    python -m benchmarks.comm.rounding --out benchmarks/results/comm-rounding.json

Ranks are rows of one tensor: the additions and roundings of comm/algorithms are done in their order, by the same Wire
(tests/unit/comm/algorithms/test_rounding.py compares the bits with ranks that are threads). Nodes have 8 ranks,
except with ring, which is also what NCCL and gloo do to half precision where they take a ring.
"""

import argparse
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.record import at_least, conditions, write_record
from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.base import HALF

NODE_SIZE = 8
NOISES = (0.1, 1.0)
"""Magnitudes of each rank's own noise, relative to what all ranks have in common."""


class Lost(NamedTuple):
    """Compares a sum with the exact one: relative error, and the share of it that is missing."""

    error: float
    lost: float


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ranks", type=at_least(1), nargs="+", default=[8, 32, 128, 512, 1024, 2048], help="(default: %(default)s)")
    add("--values", type=at_least(1), default=4096, help="of each rank (default: %(default)s)")
    add("--out", type=Path, help="JSON file for the results (default: standard output)")
    options = parser.parse_args(argv)
    facts, rows = conditions(options), []
    torch.set_num_threads(1)
    for noise, num_ranks in product(NOISES, options.ranks):
        own_RN = draw(num_ranks, options.values, noise=noise).bfloat16()
        for algorithm, reduce_dtype in product(("ring", "hierarchical", "doubling"), ("wire", "fp32")):
            sum_N = replay(algorithm, own_RN, wire=Wire(in_fp32=reduce_dtype == "fp32"))
            case = {"ranks": num_ranks, "noise": noise, "algorithm": algorithm, "reduce_dtype": reduce_dtype}
            rows.append(case | lost(sum_N, own_RN.double().sum(0))._asdict())
    write_record(options.out, {"benchmark": "rounding", "conditions": facts, "rows": rows})


def draw(num_ranks: int, num_values: int, *, noise: float) -> Tensor:
    """Draw what the ranks bring (R, N), in fp32."""
    generator = torch.Generator().manual_seed(0)
    common_N = torch.randn(num_values, generator=generator)
    return common_N + noise * torch.randn(num_ranks, num_values, generator=generator)


def lost(sum_N: Tensor, exact_N: Tensor) -> Lost:
    """Compare with the float64 sum."""
    error_N = sum_N.double() - exact_N
    return Lost(float(error_N.norm() / exact_N.norm()), -float(error_N.dot(exact_N) / exact_N.dot(exact_N)))


def replay(algorithm: str, own_RN: Tensor, *, wire: Wire) -> Tensor:
    """Sum rows as the ranks would, in nodes of NODE_SIZE but for ring; the sum (N) that all ranks would hold."""
    node_size = 1 if algorithm == "ring" else min(NODE_SIZE, len(own_RN))
    leaders_MN, *others = (own_RN[place::node_size].clone() for place in range(node_size))
    return (doubling if algorithm == "doubling" else ring)(leaders_MN, others, wire=wire)


def ring(own_MN: Tensor, others: Sequence[Tensor], *, wire: Wire) -> Tensor:
    """Sum as ring_allreduce_ does over M ranks, which bring in others (M, N) of their nodes, too."""
    num_ranks, num_values = own_MN.shape
    parts = [torch.full_like(part_S, index) for index, part_S in enumerate(_index(num_values).tensor_split(num_ranks))]
    part_N = torch.cat(parts)

    def of_places(place_N: Tensor) -> list[Tensor]:
        return [each_MN.gather(0, (place_N % num_ranks)[None])[0] for each_MN in (own_MN, *others)]

    if wire.sums_in_fp32(own_MN):
        return _straight(part_N, of_places, num_ranks, wire)
    arrived: list[Tensor] = []
    for hop in range(num_ranks):
        own_N, *others_N = of_places(part_N + hop)
        sent_N = _share(own_N, others_N, wire, arrived)
        arrived = [sent_N]
    wire.unpack_(own_N, sent_N)
    return own_N


def _straight(part_N: Tensor, of_places: Callable[[Tensor], list[Tensor]], num_ranks: int, wire: Wire) -> Tensor:
    """Sum each part where the ring would complete it."""
    own_N, *others_N = of_places(part_N - 1)
    if own_N.dtype in HALF:
        total_N = own_N.float()
        for other_N in others_N:
            total_N += other_N
    else:
        _share(total_N := own_N, others_N, wire, [])
    for hop in range(1, num_ranks):
        other_N, *its_others = of_places(part_N - 1 - hop)
        total_N += _share(other_N, its_others, wire, [])
    own_N.copy_(total_N)
    wire.unpack_(own_N, own_N.to(wire.of(own_N)))
    return own_N


def doubling(own_MN: Tensor, others: Sequence[Tensor], *, wire: Wire) -> Tensor:
    """Sum as doubling_allreduce_ does over M ranks, which bring in others (M, N) of their nodes, too."""
    if wire.sums_in_fp32(own_MN):
        sum_N = doubling(own_MN.float(), others, wire=Wire()).to(own_MN.dtype)
        wire.round_(sum_N)
        return sum_N
    num_ranks = len(own_MN)
    even = 1 << (num_ranks.bit_length() - 1)
    wire.divide_(own_MN)
    wire.add_(own_MN, others, scaled=True)
    wire.add_(own_MN[: num_ranks - even], [own_MN[even:].to(wire.of(own_MN))])
    own_MN, distance = own_MN[:even], 1
    while distance < even:
        sent_MN = own_MN.to(wire.of(own_MN))
        own_MN.copy_(sent_MN)
        wire.add_(own_MN, [sent_MN[_index(even) ^ distance]])
        distance *= 2
    sum_N = own_MN[0]
    wire.unpack_(sum_N, sum_N.to(wire.of(sum_N)))
    return sum_N


def _share(own_N: Tensor, others_N: Sequence[Tensor], wire: Wire, arrived: Sequence[Tensor]) -> Tensor:
    """Add the others of a node and what has arrived; return what is sent."""
    wire.divide_(own_N)
    wire.add_(own_N, others_N, scaled=True)
    wire.add_(own_N, arrived)
    return own_N.to(wire.of(own_N))


def _index(count: int) -> Tensor:
    return torch.arange(count)


if __name__ == "__main__":
    main()
