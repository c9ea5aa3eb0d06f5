"""The two halves of an all-reduce: where a shard lies. tests/parallel has their values over real transports."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from bigbatch.comm.algorithms.hierarchical import sharded_allreduce_
from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.base import Capabilities, Group
from bigbatch.comm.gradients.scatter_gather import ScatterGather

N = 6


@dataclass
class SecondOfTwo:
    """Rank 1 of two that hold the same; shards: how far within the whole tensor each one lay, in elements."""

    capabilities: Capabilities
    rank: int = 1
    world_size: int = 2
    world: Group = field(default_factory=lambda: Group((0, 1)))
    shards: list[int] = field(default_factory=list)

    def reduce_scatter(self, shard_M: Tensor, tensor_N: Tensor, group: Group) -> None:
        self._note(shard_M, tensor_N)
        shard_M.copy_(2 * tensor_N[N // 2 :])

    def all_gather(self, tensor_N: Tensor, shard_M: Tensor, group: Group) -> None:
        self._note(shard_M, tensor_N)
        tensor_N.copy_(torch.cat((shard_M, shard_M)))

    def _note(self, shard_M: Tensor, tensor_N: Tensor) -> None:
        self.shards.append((shard_M.data_ptr() - tensor_N.data_ptr()) // tensor_N.element_size())


def start(collective_: Callable[[Tensor], None], buffer_N: Tensor, **_: object) -> None:
    collective_(buffer_N)


@pytest.mark.parametrize("in_place", [False, True])
def test_shard_lies_in_its_place_where_the_transport_takes_it_there(in_place: bool) -> None:
    backend, buffer_N = SecondOfTwo(Capabilities(("cuda",), in_place=in_place)), torch.arange(6.0)
    transport = SimpleNamespace(backend=backend, start=start)
    second: Any = SimpleNamespace(transport=transport, rank=1, world_size=2, wire=Wire())
    halves = ScatterGather(second)
    halves.start_reduce_scatter(buffer_N, label="sum")
    assert halves.own_part(buffer_N).tolist() == [6.0, 8.0, 10.0]
    halves.start_all_gather(buffer_N, label="gather")
    assert buffer_N.tolist() == [6.0, 8.0, 10.0] * 2
    assert [shard == N // 2 for shard in backend.shards] == [in_place] * 2


@pytest.mark.parametrize("in_place", [False, True])
def test_shard_of_a_node_lies_in_its_place_as_well(in_place: bool) -> None:
    backend, buffer_N = SecondOfTwo(Capabilities(("cuda",), in_place=in_place)), torch.arange(6.0)

    def across(own_M: Tensor, others: object, announce: object) -> None:
        own_M.add_(1)

    sharded_allreduce_(buffer_N, backend, node=backend.world, num_shards=2, across=across, wire=Wire())  # type: ignore[arg-type]
    assert buffer_N.tolist() == [7.0, 9.0, 11.0] * 2
    assert [shard == N // 2 for shard in backend.shards] == [in_place] * 2
