"""Replayed sums against the algorithms over ranks that are threads; the log's line on sums that round at each hop."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_ranks import sum_by_threads

from benchmarks.comm import rounding
from benchmarks.comm.rounding import draw, lost, replay
from bigbatch.comm.algorithms.doubling import doubling_allreduce_
from bigbatch.comm.algorithms.ring import ring_allreduce_
from bigbatch.comm.algorithms.wire import HOP_ERRORS, Wire, rounding_note
from bigbatch.comm.backends.base import Capabilities

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
WIRES = [
    (dtype, Wire(wire_dtype, predivide, in_fp32=in_fp32))
    for dtype, wire_dtype, predivide in ((BF16, None, 1.0), (FP16, None, 1.0), (FP32, BF16, 1.0), (FP32, FP16, 3.0))
    for in_fp32 in (False, True)
]


@pytest.mark.parametrize(("dtype", "wire"), WIRES, ids=str)
@pytest.mark.parametrize("name", ["ring", "doubling"])
def test_replay_ends_with_the_bits_of_the_algorithm(name: str, dtype: torch.dtype, wire: Wire) -> None:
    algorithm = {"ring": ring_allreduce_, "doubling": doubling_allreduce_}[name]
    for num_ranks, num_others in product((1, 2, 3, 4, 7), (0, 2)):
        own_MN = draw(num_ranks, 101, noise=1.0).to(dtype)
        # sum_by_threads gives all ranks the same others
        others = [other_N.to(dtype) for other_N in draw(num_others + 1, 101, noise=2.0)[1:]]
        spread = [other_N.expand(num_ranks, -1).clone() for other_N in others]
        replayed_N = getattr(rounding, name)(own_MN.clone(), spread, wire=wire)
        sum_by_threads(algorithm, ranks := list(own_MN.clone()), wire=wire, others=others)
        for rank_N in ranks:
            assert torch.equal(rank_N, replayed_N), f"{num_ranks} ranks, {num_others} others"


PER_HOP = Wire(in_fp32=False)


def note(algorithm: str, wire: Wire, dtype: torch.dtype, *, num_ranks: int, rounds: bool = True) -> str:
    capabilities = Capabilities(("cpu",), sums_half_in_fp32=not rounds)
    backend: Any = SimpleNamespace(name="some", world_size=num_ranks, capabilities=capabilities)
    return rounding_note((algorithm,), wire, dtype=dtype, backend=backend, num_nodes=-(-num_ranks // 8))


@pytest.mark.parametrize(
    ("algorithm", "wire", "dtype", "first"),
    [
        ("ring", PER_HOP, BF16, 64),
        ("native", PER_HOP, BF16, 64),
        ("hierarchical", PER_HOP, BF16, 512),
        ("sharded", Wire(BF16, in_fp32=False), FP32, 512),
        ("ring", PER_HOP, FP16, 512),
        ("ring", Wire(FP16, in_fp32=False), FP32, 512),
    ],
)
def test_rounding_is_noted_from_so_many_ranks_on(algorithm: str, wire: Wire, dtype: torch.dtype, first: int) -> None:
    assert not note(algorithm, wire, dtype, num_ranks=first - 8)
    assert "comm.reduce_dtype" in note(algorithm, wire, dtype, num_ranks=first)
    assert "1% or more" in note(algorithm, wire, dtype, num_ranks=first)


def test_rounding_is_not_noted_where_no_hop_rounds() -> None:
    assert not note("ring", Wire(), BF16, num_ranks=2048)
    assert not note("ring", PER_HOP, FP32, num_ranks=2048)
    assert not note("doubling", PER_HOP, BF16, num_ranks=2048)
    assert not note("native", PER_HOP, BF16, num_ranks=2048, rounds=False)
    assert not note("native", PER_HOP, BF16, num_ranks=1)


def test_rounding_note_names_a_narrow_wire_that_saves_nothing() -> None:
    assert "comm.wire_dtype" in note("native", Wire(BF16), FP32, num_ranks=2)
    assert not note("native", Wire(BF16), FP32, num_ranks=2, rounds=False)
    assert not note("ring", Wire(BF16), FP32, num_ranks=2)
    assert not note("native", Wire(), BF16, num_ranks=2)


@pytest.mark.parametrize(("hops_u", "shown"), HOP_ERRORS)
def test_rounding_figures_are_what_replayed_sums_lose(hops_u: float, shown: str) -> None:
    terms_RN = draw(num_ranks := int(hops_u * 256), 256, noise=0.1).to(BF16)
    error = lost(replay("ring", terms_RN, wire=PER_HOP), terms_RN.double().sum(0)).error
    assert error == pytest.approx(float(shown.rstrip("%")) / 100, rel=0.35)
    assert f"{shown} or more" in note("ring", PER_HOP, BF16, num_ranks=num_ranks)
