"""Facts that decide the order of gradient sums over ranks, and so their rounding; checkpoints keep them."""

import hashlib
import json
from collections.abc import Mapping, Sequence

from bigbatch.comm.algorithms.by_name import summed_by_library
from bigbatch.comm.communicator import Communicator
from bigbatch.comm.gradients.fusion import FusionPlan
from bigbatch.comm.rendezvous.topology import Topology

BY_NODE = {"native", "hierarchical", "sharded"}
"""Algorithms whose order of summation depends on the nodes; the others depend on the order of ranks only."""


def summing_algorithms(communicator: Communicator) -> Sequence[str]:
    """Return the algorithms that sum the buffers: one, or each of the hybrid's table."""
    if communicator.algorithm == "hybrid" and communicator.table:
        return communicator.table.algorithms
    return (communicator.algorithm,)


def describe_sums(communicator: Communicator, plan: FusionPlan, *, is_sharded: bool) -> dict[str, str]:
    """Return the facts as short texts; table and plan as digests. For one rank only the number of ranks."""
    if communicator.world_size == 1:
        return {"ranks": "1"}
    names = {*summing_algorithms(communicator), *(["native"] if is_sharded else [])}
    algorithm = communicator.algorithm
    if algorithm == "hybrid" and communicator.table:
        algorithm = f"hybrid by table {_digest(json.dumps(communicator.table.as_rows()))}"
    if is_sharded:
        algorithm = f"reduce-scatter, {algorithm} beside"  # by which a sharded run sums only the statistics
    if names & summed_by_library(communicator.transport.backend):
        algorithm = f"{algorithm} over {communicator.transport.backend.name}"
    return {
        "ranks": str(communicator.world_size),
        "algorithm": algorithm,
        "fusion plan": _digest(json.dumps([[tensor.name for tensor in each.tensors] for each in plan.buffers])),
        "nodes": _describe_nodes(communicator.connection.topology, is_by_node=bool(names & BY_NODE)),
    }


def _describe_nodes(topology: Topology, *, is_by_node: bool) -> str:
    """Return as text how ranks are divided among nodes; "any" if the algorithms do not depend on it."""
    is_scattered = list(topology.ring) != sorted(topology.ring)
    if not is_by_node and not is_scattered:
        return "any"
    sizes = [len(group) for group in topology.groups]
    text = f"{len(sizes)}x{sizes[0]}" if len(set(sizes)) == 1 else "+".join(map(str, sizes))
    return f"{text} scattered" if is_scattered else text


def sums_notes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return log lines on the differences from a checkpoint's facts; none if it has no facts.

    For one rank only the number of ranks is compared.
    """
    changed = [key for key in now if key in before and before[key] != now[key]]
    if {"ranks", "algorithm"} & set(changed):  # these explain other nodes, too
        changed = [key for key in changed if key != "nodes"]
    if not changed:
        return []
    changes = "; ".join(f"{key} {before[key]}, now {now[key]}" for key in changed)
    return [
        f"sums over ranks go another way than in the checkpoint ({changes}): the last bits may differ from those of a "
        "run that was not interrupted; run.reproducible would keep them"
    ]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
