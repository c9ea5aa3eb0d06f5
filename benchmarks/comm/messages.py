"""Messages of a rank in a step, per recipe and algorithm, at any number of ranks: counted, without any arithmetic.

    python -m benchmarks.comm.messages --nodes 256 --ranks-per-node 8

The algorithms run as they are, over a transport that counts and sends nothing, on the fusion buffers of each recipe's
gradients as tensors without memory, with collectives inside nodes. Over NCCL the hierarchical and the sharded form are
three collectives of its own for each buffer instead, without messages. Recipes with the same buffers share a row. What
runs in parallel over a node's links is one message here: a time does not follow from it.
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.record import table
from bigbatch.comm.algorithms.by_name import make_allreduce
from bigbatch.comm.backends.base import Capabilities, Group, InFlight
from bigbatch.comm.gradients.fusion import DEFAULT_SIZES, BufferPlan, PlanSizes
from bigbatch.comm.gradients.reducer import tensor_spec
from bigbatch.comm.rendezvous.control import OperationFacts, Pending
from bigbatch.comm.rendezvous.topology import Topology
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.models import build_model
from bigbatch.trainer.step.precision import COMPUTE_DTYPES, to_half_

if TYPE_CHECKING:
    from typing_extensions import Unpack

COUNTED = ("native", "ring", "hierarchical", "sharded", "doubling")
"""Algorithms to count; hybrid uses one of them for each buffer, by its size."""
RECIPES = sorted(Path(__file__).parents[2].glob("configs/imagenet/*.yaml"))

WITHOUT_MEMORY = Capabilities(("meta",))


@dataclass
class CountingBackend:
    """Counts the operations that one rank of a world starts, as if every other rank did its part."""

    rank: int
    world_size: int
    name: str = "counted"
    capabilities: Capabilities = WITHOUT_MEMORY
    messages: int = 0
    """Messages to single ranks that this one sent."""
    message_bytes: int = 0
    collectives: int = 0
    groups: list[Group] = field(default_factory=list)
    """Groups besides the world that contain this rank."""
    world: Group = field(init=False)

    def __post_init__(self) -> None:
        """Make the world of all ranks."""
        self.world = Group(tuple(range(self.world_size)))

    def new_group(self, families: Sequence[Sequence[int]]) -> Group:
        """Return this rank's group."""
        self.groups.append(Group(tuple(next((each for each in families if self.rank in each), [self.rank]))))
        return self.groups[-1]

    def _count(self, *words: Any, **options: Any) -> None:
        """Count a collective; its group is the last of the positional arguments."""
        self.collectives += len(words[-1].ranks) > 1

    all_reduce_ = reduce_ = broadcast_ = reduce_scatter = all_gather = _count

    def start_send(self, tensor_N: Tensor, *, to: int) -> InFlight:
        """Count it."""
        self.messages += 1
        self.message_bytes += tensor_N.nbytes
        return InFlight()

    def start_receive(self, tensor_N: Tensor, *, source: int) -> InFlight:
        """Do nothing: it is counted by the sender."""
        return InFlight()

    def start_exchange(self, *, send: Tensor, to: int, receive: Tensor, source: int) -> InFlight:
        """Count the sent message."""
        return self.start_send(send, to=to)

    def submit(self, operation: Callable[[], None], **facts: "Unpack[OperationFacts]") -> InFlight:
        """Run it at once."""
        operation()
        return InFlight()

    def oldest(self) -> Pending | None:
        """Return None: no operation is ever under way."""
        return None

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def abandon(self) -> None:
        """Do nothing: there is nothing to release."""


def place(rank: int, *, nodes: int, ranks_per_node: int) -> Topology:
    """Put ranks into nodes of one size, one after the other."""
    k = ranks_per_node
    return Topology(rank, tuple(tuple(range(node * k, (node + 1) * k)) for node in range(nodes)))


def count(
    algorithm: str, topology: Topology, buffers: Iterable[Tensor], *, library: str = "counted"
) -> CountingBackend:
    """Sum all buffers, tensors of the device meta, as one rank; return what it sent.

    library: "nccl" for the forms that are made of its collectives.
    """
    backend = CountingBackend(topology.rank, topology.world_size, library)
    all_reduce_ = make_allreduce(algorithm, backend=backend, topology=topology)
    for buffer_N in buffers:
        all_reduce_(buffer_N)
    return backend


def plan_of(recipe: str) -> tuple[BufferPlan, ...]:
    """Plan the fusion buffers of a recipe, before their order is learned."""
    config = load_config(["--config", recipe])
    with torch.device("meta"):
        # other settings of a recipe's model change no gradient's size
        width = {name: value for name, value in (config.model.options or {}).items() if name == "width"}
        model = build_model(config.model.name, num_classes=config.data.num_classes, norm=nn.BatchNorm2d, **width)
        to_half_(model, COMPUTE_DTYPES[config.optimizer.precision])
    sizes = {name: getattr(config.comm, name) for name in asdict(DEFAULT_SIZES)}
    tensors = [tensor_spec(*each) for each in reversed([*model.named_parameters()])]
    return PlanSizes(**sizes).plan(tensors).buffers


def empty(plan: Iterable[BufferPlan]) -> list[Tensor]:
    """Make the buffers of a plan, without memory."""
    dtypes = [getattr(torch, buffer.tensors[0].dtype) for buffer in plan]
    return [
        torch.empty(buffer.num_elements, dtype=dtype, device="meta") for buffer, dtype in zip(plan, dtypes, strict=True)
    ]


def cell(algorithm: str, plan: Iterable[BufferPlan], *, nodes: int, ranks_per_node: int) -> str:
    """Write a leader's messages in a step; and those of the others in its node, if their number differs."""
    size = {"nodes": nodes, "ranks_per_node": ranks_per_node}
    leader, last = (count(algorithm, place(rank, **size), empty(plan)) for rank in (0, ranks_per_node - 1))
    collectives = f"{leader.collectives} collectives" if leader.collectives else ""
    told = f"{leader.messages:,} of {leader.message_bytes / 1e6:,.1f} MB in all" if leader.messages else ""
    others = f" (others {last.messages:,})" if last.messages != leader.messages else ""
    return ", ".join(part for part in (collectives, told + others) if part)


def by_recipe(recipes: Iterable[str], *, nodes: int, ranks_per_node: int) -> str:
    """Write a table in Markdown."""
    plans: dict[tuple[BufferPlan, ...], list[str]] = {}
    for recipe in recipes:
        plans.setdefault(plan_of(recipe), []).append(recipe.removeprefix("imagenet/"))
    rows = []
    for plan, names in plans.items():
        buffers = f"{len(plan)} of {sum(buffer.num_bytes for buffer in plan) / 1e6:,.1f} MB in all"
        cells = [cell(algorithm, plan, nodes=nodes, ranks_per_node=ranks_per_node) for algorithm in COUNTED]
        rows.append((", ".join(names), buffers, *cells))
    return table(("recipes", "buffers", *COUNTED), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=256)
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--recipes", nargs="+", default=[f"imagenet/{path.stem}" for path in RECIPES])
    options = parser.parse_args()
    print(by_recipe(options.recipes, nodes=options.nodes, ranks_per_node=options.ranks_per_node))


if __name__ == "__main__":
    main()
