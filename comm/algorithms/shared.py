"""Hierarchical all-reduce of host tensors: sums inside a node through shared memory, between nodes by messages."""

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bigbatch.comm.algorithms.ring import Across, require_flat, ring_order
from bigbatch.comm.backends.base import ALL_DTYPES, Backend, InFlight
from bigbatch.comm.backends.node_memory import NodeMemory
from bigbatch.comm.rendezvous.topology import Topology
from bigbatch.errors import CommError

WHOLE_BYTES = 256 * 1024
"""A shard up to this size is copied inside the node once it is complete, a longer one part by part."""
_READY = struct.Struct("!qqqq")
"""Ready message: region, offset and bytes of the tensor, and the dtype by number."""
_DTYPES = ALL_DTYPES


@dataclass(frozen=True)
class ShardAssignment:
    """Assignment of shards: owner i of each node sums shard i of count, together with owner i of every other node.

    count 1 is the hierarchical form with leaders (Jia et al. 2018); the size of the smallest node is the 2D torus.
    order: the parts of a shard in the order in which across announces them.
    """

    count: int
    across: Across
    order: tuple[int, ...]


def make_shared(
    count: int, across: Across, *, backend: Backend, topology: Topology, memory: NodeMemory
) -> Callable[[Tensor], None]:
    """Return the hierarchical (count: 1) or sharded all-reduce of tensors in shared memory. Not collective."""
    owners = ShardAssignment(count, across, ring_order(topology.num_nodes, topology.node_rank))
    here = topology.node
    return lambda buffer_N: shared_allreduce_(buffer_N, backend=backend, memory=memory, node=here, owners=owners)


def shared_allreduce_(
    buffer_N: Tensor, *, backend: Backend, memory: NodeMemory, node: Sequence[int], owners: ShardAssignment
) -> None:
    """Sum buffer_N over all ranks, in place; it lies in memory that the ranks of a node share.

    Collective. Each owner adds the other ranks' values in place, one segment at a time, just before that segment leaves
    the node. The other ranks copy each part as soon as it is final, so no step waits for a whole tensor. Between m
    nodes, this sends 2 * nbytes * (m - 1) / m per node.
    Raises: ValueError for a tensor outside shared memory; CommError if ranks of a node sum different tensors.
    """
    require_flat(buffer_N)
    views = memory.views(buffer_N)
    if views is None:
        raise ValueError("this all-reduce needs a tensor from Communicator.allocate()")
    _SharedSum(buffer_N, views, backend, memory, tuple(node), owners).run()


class _SharedSum:
    def __init__(
        self,
        buffer_N: Tensor,
        views: Sequence[Tensor],
        backend: Backend,
        memory: NodeMemory,
        node: tuple[int, ...],
        owners: ShardAssignment,
    ) -> None:
        self._backend, self._node, self._owners = backend, node, owners
        self._place = node.index(backend.rank)
        self._shards = [view_N.tensor_split(owners.count) for view_N in views]
        self._tensor_id = _READY.pack(*memory.name_of(buffer_N), _DTYPES.index(buffer_N.dtype))
        self._is_long = self._shards[0][0].nbytes > WHOLE_BYTES

    def run(self) -> None:
        """Tell the owners that this rank's values are in place; sum this rank's shard, if any; copy the others'."""
        owners = [place for place in range(self._owners.count) if place != self._place]
        sent: list[InFlight] = [self._send(place, self._tensor_id) for place in owners]
        if self._place < self._owners.count:
            # sum before copying: if every owner first waited for another owner's shard, all would deadlock
            sent += self._sum_own_shard()
        for place in owners:
            pieces = self._owners.order if self._is_long else (0,)
            targets, sources = (self._shards[each][place].tensor_split(len(pieces)) for each in (self._place, place))
            for piece in pieces:
                self._receive([place], 1)  # the owner announces each of these
                targets[piece].copy_(sources[piece])
            sent.append(self._send(place, b"r"))  # tell the owner that this rank has read it
        if self._place < self._owners.count:
            # wait until all have read it: the next step writes into this memory
            self._receive(self._other_places(), 1)
        InFlight(*(each.wait for each in sent)).wait()

    def _sum_own_shard(self) -> list[InFlight]:
        # the message says that the sender's values are in place, and of which tensor they are
        self._check(self._receive(self._other_places(), _READY.size))
        others = [self._shards[place][self._place] for place in self._other_places()]
        sent: list[InFlight] = []

        def announce(part: int) -> None:
            if self._is_long:
                sent.extend(self._send(place, b"p") for place in self._other_places())

        self._owners.across(self._shards[self._place][self._place], others, announce)
        if not self._is_long:
            sent.extend(self._send(place, b"p") for place in self._other_places())
        return sent

    def _other_places(self) -> list[int]:
        return [place for place in range(len(self._node)) if place != self._place]

    def _send(self, place: int, message: bytes) -> InFlight:
        return self._backend.start_send(torch.frombuffer(bytearray(message), dtype=torch.uint8), to=self._node[place])

    def _receive(self, places: Sequence[int], num_bytes: int) -> list[bytes]:
        received = [torch.empty(num_bytes, dtype=torch.uint8) for _ in places]
        works = [
            self._backend.start_receive(received_B, source=self._node[place])
            for received_B, place in zip(received, places, strict=True)
        ]
        InFlight(*(work.wait for work in works)).wait()
        return [received_B.numpy().tobytes() for received_B in received]

    def _check(self, tensor_ids: Sequence[bytes]) -> None:
        for place, tensor_id in zip(self._other_places(), tensor_ids, strict=True):
            if tensor_id != self._tensor_id:
                raise CommError(
                    f"rank {self._node[place]} sums {_describe(tensor_id)} while rank {self._backend.rank} on the same "
                    f"host sums {_describe(self._tensor_id)}: all ranks must sum the same tensors in the same order"
                )


def _describe(tensor_id: bytes) -> str:
    region, offset, num_bytes, dtype = _READY.unpack(tensor_id)
    return f"{num_bytes} bytes of {_DTYPES[dtype]} at {offset} in allocation {region}"
