"""All-reduce algorithms by name: short functions over a backend and its groups."""

from collections.abc import Callable

from torch import Tensor

from bigbatch.comm.algorithms.hierarchical import hierarchical_allreduce_, sharded_allreduce_
from bigbatch.comm.algorithms.ring import ring_allreduce_
from bigbatch.comm.backends.base import Backend
from bigbatch.comm.topology import Topology

AllReduce = Callable[[Tensor], None]
"""Sums a flat tensor over all ranks, in place. Collective; identical bits on all ranks."""

ALGORITHMS = ("native", "ring", "hierarchical", "sharded")


def make_allreduce(name: str, *, backend: Backend, topology: Topology) -> AllReduce:
    """The named algorithm over the whole job, with the groups it needs. Collective.

    native is the backend's own; for the others see ring.py and hierarchical.py.
    Raises: ValueError for an unknown name, or a topology on which the algorithm is not defined.
    """
    if name == "native":
        return lambda buffer_N: backend.all_reduce_(buffer_N, backend.world)
    if name == "ring":
        return lambda buffer_N: ring_allreduce_(buffer_N, backend, topology.ring)
    if name == "hierarchical":
        node = backend.new_group(topology.groups)
        leaders = topology.leaders
        return lambda buffer_N: hierarchical_allreduce_(buffer_N, backend, node=node, leaders=leaders)
    if name == "sharded":
        columns = topology.columns
        node, column = backend.new_group(topology.groups), backend.new_group(columns)
        return lambda buffer_N: sharded_allreduce_(buffer_N, backend, node=node, column=column)
    raise ValueError(f"all-reduce algorithm {name!r} is unknown; choose one of {', '.join(ALGORITHMS)}")
