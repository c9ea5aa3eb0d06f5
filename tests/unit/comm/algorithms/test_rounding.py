"""The log's line on sums that round at each hop, compared with the error of replayed sums."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replayed_sums import draw, lost, replay

from bigbatch.comm.algorithms.wire import LOST, Wire, rounding_note
from bigbatch.comm.backends.base import Capabilities

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
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


@pytest.mark.parametrize(("hops_u", "shown"), LOST)
def test_rounding_figures_are_what_replayed_sums_lose(hops_u: float, shown: str) -> None:
    terms_RN = draw(num_ranks := int(hops_u * 256), 256, noise=0.1).to(BF16)
    error = lost(replay("ring", terms_RN, wire=PER_HOP), terms_RN.double().sum(0)).error
    assert error == pytest.approx(float(shown.rstrip("%")) / 100, rel=0.35)
    assert f"{shown} or more" in note("ring", PER_HOP, BF16, num_ranks=num_ranks)
