"""Messages, bytes and groups of every algorithm at 2,048 ranks: closed forms, and what fake groups are asked."""

import re
from collections.abc import Callable, Sequence
from math import ceil, log2
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from benchmark_process import run_benchmark
from played_gpus import PlayedGpus
from played_nccl import PlayedNccl

from benchmarks.comm.messages import COUNTED, CountingBackend, by_recipe, count, empty, place, plan_of
from bigbatch.comm.algorithms.by_name import make_allreduce
from bigbatch.comm.algorithms.ring import SEGMENT_BYTES
from bigbatch.comm.backends import torch_distributed
from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.rendezvous.environ import ALONE, ProcessEnv
from bigbatch.comm.rendezvous.job_control import JobControl

NODES, RANKS_PER_NODE = 256, 8
WORLD_SIZE = NODES * RANKS_PER_NODE
NUM_ELEMENTS = 1 << 26
"""256 MiB of fp32: a leader's part of it is cut into two segments, a shard's into one."""


def counted(algorithm: str, rank: int) -> CountingBackend:
    topology = place(rank, nodes=NODES, ranks_per_node=RANKS_PER_NODE)
    return count(algorithm, topology, [torch.empty(NUM_ELEMENTS, device="meta")])


def hops_of_a_ring(num_ranks: int, num_bytes: int) -> int:
    return 2 * (num_ranks - 1) * ceil(num_bytes / num_ranks / SEGMENT_BYTES)


@pytest.mark.parametrize("rank", [0, 5])
def test_messages_of_each_algorithm_are_those_of_its_closed_form(rank: int) -> None:
    whole, is_leader = 4 * NUM_ELEMENTS, rank % RANKS_PER_NODE == 0
    shard = whole // RANKS_PER_NODE
    expected = {
        "native": (0, 0, 1),
        "ring": (hops_of_a_ring(WORLD_SIZE, whole), 2 * (WORLD_SIZE - 1) * whole // WORLD_SIZE, 0),
        "hierarchical": (is_leader * hops_of_a_ring(NODES, whole), is_leader * 2 * (NODES - 1) * whole // NODES, 2),
        "sharded": (hops_of_a_ring(NODES, shard), 2 * (NODES - 1) * shard // NODES, 2),
        "doubling": (is_leader * int(log2(NODES)), is_leader * int(log2(NODES)) * whole, 2),
    }
    assert expected["hierarchical"][0] == is_leader * 4 * (NODES - 1)
    found = {name: counted(name, rank) for name in expected}
    assert {name: (each.messages, each.message_bytes, each.collectives) for name, each in found.items()} == expected


class Asked:
    """What a rank of NCCL's asks of torch.distributed, in whose fake groups nothing travels."""

    def __init__(self, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
        PlayedGpus(RANKS_PER_NODE, monkeypatch=monkeypatch)
        self.library = PlayedNccl(monkeypatch)
        local = rank % RANKS_PER_NODE
        env = ProcessEnv("torchrun", rank, WORLD_SIZE, local, RANKS_PER_NODE, "here", ("127.0.0.1", 0))
        control = JobControl(ALONE, timeout_seconds=60)
        gpu = torch.device("cuda", local)
        self.backend = TorchDistributedBackend(env, control, library="nccl", device=gpu)
        self.messages = self.message_bytes = self.collectives = 0
        exchange = dist.batch_isend_irecv

        def counted(hops: Sequence[dist.P2POp]) -> Any:
            sent = [hop.tensor.nbytes for hop in hops if hop.op is dist.isend]
            self.messages += len(sent)
            self.message_bytes += sum(sent)
            return exchange(hops)

        monkeypatch.setattr(dist, "batch_isend_irecv", counted)
        for module, name in (
            *((dist, name) for name in ("all_reduce", "reduce", "broadcast")),
            *((torch_distributed, name) for name in ("_reduce_scatter", "_all_gather")),
        ):
            monkeypatch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self.collectives += 1
            return collective(*args, **options)

        return counted


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "rank"), [("nus_resnet50_16k", 13), ("resnet50_8k", 0)])
def test_messages_are_those_that_a_rank_asks_of_torch(recipe: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In NCCL's world of 2,048 ranks, for the buffers of each kind of recipe: the counts made without torch agree."""
    plan, topology = plan_of(f"imagenet/{recipe}"), place(rank, nodes=NODES, ranks_per_node=RANKS_PER_NODE)
    asked = Asked(rank, monkeypatch)
    try:
        for algorithm in COUNTED:
            asked.messages = asked.message_bytes = asked.collectives = 0
            all_reduce_ = make_allreduce(algorithm, backend=asked.backend, topology=topology)
            for buffer_N in empty(plan):
                all_reduce_(torch.empty_like(buffer_N, device="cpu"))
            expected = count(algorithm, topology, empty(plan), library="nccl")
            found = (asked.messages, asked.message_bytes, asked.collectives)
            assert found == (expected.messages, expected.message_bytes, expected.collectives), algorithm
        columns = [list(range(k, WORLD_SIZE, 8)) for k in range(8)]
        nodes = [list(range(k, k + 8)) for k in range(0, WORLD_SIZE, 8)]
        assert asked.library.of("split") == [columns[:1], nodes, columns[1:]], "each once, for all"
    finally:
        dist.destroy_process_group()


@pytest.mark.long
@pytest.mark.parametrize(
    ("row", "recipe"),
    [("`alexnet_bn_64k`", "imagenet/alexnet_bn_64k"), ("all others", "imagenet/resnet50_8k")],
)
def test_messages_of_the_page_are_those_that_are_counted(row: str, recipe: str) -> None:
    """The numbers of each cell; the generated one says in words what the page's heads say."""
    page = (Path(__file__).parents[3] / "docs/simulate.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {row}")]
    generated = by_recipe([recipe], nodes=NODES, ranks_per_node=RANKS_PER_NODE).splitlines()[-1]
    generated = re.sub(r"\d+ collectives, ", "", generated)
    shown, counted = ([re.findall(r"[\d.,]*\d", cell) for cell in each.split("|")[2:-1]] for each in (line, generated))
    assert [cell[: len(page_cell)] for cell, page_cell in zip(counted, shown, strict=True)] == shown


@pytest.mark.long
def test_messages_table_of_a_recipe() -> None:
    """ResNet-50's 25,557,032 gradients in fp16, as jia_resnet50_64k has them."""
    done = run_benchmark("comm.messages", "--nodes", 4, "--recipes", "imagenet/jia_resnet50_64k")
    assert "| jia_resnet50_64k | 3 of 51.2 MB in all | 3 collectives |" in done.stdout, done.stderr
