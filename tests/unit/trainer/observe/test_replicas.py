"""Digests of weights: exact, and seen to differ for every bit and place; which rank is odd, and in what."""

import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from small_run import PLAN, Recorder, make_batches, make_parts, train
from thread_ranks import Meeting
from torch import Tensor

from bigbatch.errors import ReplicasDiffer
from bigbatch.trainer.observe import replicas as module
from bigbatch.trainer.observe.replicas import digest, replicas, require_same


def by_python(integers: Sequence[int]) -> int:
    """The digest in whole numbers of any size, as a signed one of 64 bits."""
    total = sum(value * (2 * i + 1) for i, value in enumerate(integers)) % 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("piece", [3, 1 << 20])
@pytest.mark.parametrize(
    ("dtype", "integer"), [("float32", "int32"), ("bfloat16", "int16"), ("float64", "int64"), ("bool", "uint8")]
)
def test_digest_is_the_sum_by_places(dtype: str, integer: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", piece)
    monkeypatch.setattr(module, "CACHED", piece)
    x_N = torch.randn(20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    bits_N = x_N.view(getattr(torch, integer))
    expected = by_python(bits_N.tolist())
    assert module._by_products(bits_N).item() == expected, "as on a GPU"
    assert digest([x_N, x_N[:0]]).tolist() == [expected, 0]


def test_digest_of_any_layout_is_that_of_its_elements() -> None:
    x_BCHW = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    in_memory_N = x_BCHW.permute(0, 2, 3, 1).flatten()
    gaps_N = torch.randn(20)[::2]
    assert digest([x_BCHW, gaps_N]).tolist() == digest([in_memory_N, gaps_N.clone()]).tolist()
    assert digest([torch.tensor(1.5)]).tolist() == digest([torch.tensor([1.5])]).tolist()


def test_digest_tells_every_flipped_bit_and_every_exchange() -> None:
    x_N = torch.randn(20, generator=torch.Generator().manual_seed(0))
    bits_N, found = x_N.view(torch.int32), [digest([x_N]).item()]
    for place in range(20):
        for bit in range(32):
            mask = 1 << bit if bit < 31 else -(1 << 31)
            bits_N[place] ^= mask
            found.append(digest([x_N]).item())
            bits_N[place] ^= mask
    for one in range(20):
        for other in range(one):
            x_N[[one, other]] = x_N[[other, one]]
            found.append(digest([x_N]).item())
            x_N[[one, other]] = x_N[[other, one]]
    assert digest([x_N]).item() == found[0]
    assert len(set(found)) == len(found) == 1 + 20 * 32 + 20 * 19 // 2


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_replicas_are_weights_state_statistics(precision: str) -> None:
    parts = make_parts(precision=precision)
    names = [name for name, _ in parts.model.named_parameters()]
    statistics = ["the running statistics of batch norm"]
    assert list(replicas(parts, done=0)) == names + statistics
    train(PLAN, parts, Recorder(), iter(make_batches()))
    found = replicas(parts, done=4)
    assert list(found) == names + [f"momentum_buffer of {name}" for name in names] + statistics
    assert all(found[name] is parts.precision.masters[name] for name in names), "all digits"


def compare_all(ranks: Sequence[Sequence[Tensor]]) -> list[str]:
    """Compare what each rank holds, a list of tensors; what each says, empty where it finds nothing."""
    meeting = Meeting(len(ranks))

    def one(rank: int) -> str:
        communicator: Any = SimpleNamespace(
            rank=rank,
            world_size=len(ranks),
            device=torch.device("cpu"),
            connection=SimpleNamespace(control=SimpleNamespace(host_of=lambda other: f"node{other}")),
            sum_=lambda tensor_N, label: torch.stack(meeting.exchange(rank, tensor_N)).sum(0),
            gather=lambda value: meeting.exchange(rank, value),
        )
        try:
            require_same(communicator, ["stem", "head"], digest(ranks[rank]), done=7)
        except ReplicasDiffer as error:
            return f"{error.exit_code}: {error}"
        return ""

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


def weights(*, flipped: str = "") -> list[Tensor]:
    tensors = {"stem": torch.ones(5), "head": torch.ones(4)}
    if flipped:
        tensors[flipped].view(torch.int32)[3] ^= 1
    return list(tensors.values())


def test_ranks_of_the_same_bits_go_on() -> None:
    assert compare_all([weights(), weights(), weights()]) == [""] * 3


@pytest.mark.parametrize("odd", range(3))
def test_odd_rank_of_three_is_named_with_its_tensor(odd: int) -> None:
    said = compare_all([weights(flipped="head" if rank == odd else "") for rank in range(3)])
    assert len(set(said)) == 1
    assert re.search(naming("5: after step 7 ", f"rank {odd} on node{odd} and the 2 others", " of head: "), said[0])


def test_two_ranks_that_differ_are_both_named() -> None:
    said = compare_all([weights(), weights(flipped="stem")])
    named = naming("rank 0 on node0 and rank 1 on node1", " of stem, and no majority tells which")
    assert len(set(said)) == 1
    assert re.search(named, said[0])


def test_several_odd_ranks_and_tensors_are_counted() -> None:
    both = [weights(flipped="stem")[0], weights(flipped="head")[1]]
    (said,) = set(compare_all([weights(), both, weights(), both, weights()]))
    assert re.search(naming("ranks 1 on node1, 3 on node3 and the 3 others", "stem and 1 more of 2 tensors"), said)
    assert "no majority" not in said
