"""Which algorithms and fusion plans are worth measuring: all of them simulated on a model of the cluster. Pure."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf

from bigbatch.comm.gradients.fusion import PlanSizes, TensorSpec
from bigbatch.comm.tuning.cost_model import MODELS, ClusterModel, LinkModel, SecondsOf
from bigbatch.comm.tuning.plan_search import Backward, PlanChoice, best_plan, plans_to_try

BEST_FEW = 3
"""How many of the best simulated are measured."""


ALIKE = 1.02
"""Simulated times within this ratio are one time: on nodes of one rank three algorithms have the same closed form."""
IN_MEMORY = ("hierarchical", "sharded")
"""Algorithms that sum in a node's shared memory, where there is any."""
UNUSED = LinkModel(0.0, inf)


def cluster_model(
    groups: Sequence[Sequence[int]], *, inside: LinkModel | None, across: LinkModel | None
) -> ClusterModel | None:
    """Model the ranks of each node by measured links; None for one rank, or without a link that they need."""
    sizes = tuple(len(group) for group in groups)
    if sum(sizes) == 1 or (max(sizes) > 1 and inside is None) or (len(sizes) > 1 and across is None):
        return None
    return ClusterModel(sizes, inside=inside or UNUSED, across=across or UNUSED)


@dataclass(frozen=True)
class Ranking:
    """Holds what was simulated: each algorithm's best plan, from the one that exposes least on."""

    best: Mapping[str, PlanChoice]
    seconds_by: Mapping[str, SecondsOf]
    """Of each algorithm, by the bytes of a buffer."""
    num_simulated: int
    """Steps: each plan by each algorithm."""
    seconds: float
    """That simulating took."""

    def worth_measuring(self, num_bytes: int, names: Sequence[str], *, count: int) -> list[str]:
        """Keep the count fastest at a size, whom the model cannot tell from the last of them, and who has no model."""
        seconds = {name: self.seconds_by[name](num_bytes) for name in self.best}
        limit = sorted(seconds.values())[min(count, len(seconds)) - 1] * ALIKE if seconds else 0.0
        return [name for name in names if name not in seconds or seconds[name] <= limit]


def rank(
    cluster: ClusterModel,
    tensors: Sequence[TensorSpec],
    backward: Backward,
    *,
    algorithms: Sequence[str],
    stated: PlanSizes,
    wire_shares: Mapping[str, float] | None = None,
    shares_memory: bool = False,
) -> Ranking:
    """Simulate a step with each plan, by each of the algorithms whose closed form is known.

    wire_shares: of a gradient's bytes that travel by each algorithm; None for all of them. shares_memory: those of
    IN_MEMORY need no messages in a node; what they take there has no model, and is left to the measurement.
    """
    start = time.perf_counter()
    plans = plans_to_try(tensors, backward, stated=stated)
    without_messages = replace(cluster, inside=UNUSED) if shares_memory else cluster
    seconds_by = {
        name: cache(
            partial(
                _seconds, name, without_messages if name in IN_MEMORY else cluster, (wire_shares or {}).get(name, 1.0)
            )
        )
        for name in algorithms
        if name in MODELS
    }
    found = {name: best_plan(plans, backward, seconds_of) for name, seconds_of in seconds_by.items()}
    best = dict(sorted(found.items(), key=lambda item: item[1].exposed_seconds))
    return Ranking(best, seconds_by, len(plans) * len(seconds_by), time.perf_counter() - start)


def _seconds(name: str, cluster: ClusterModel, wire_share: float, num_bytes: int) -> float:
    return MODELS[name](num_bytes * wire_share, cluster)
