"""Messages, bytes and groups of every algorithm at 2,048 ranks, against closed forms."""

import re
from math import ceil, log2
from pathlib import Path

import pytest
import torch
from benchmark_process import run_benchmark

from benchmarks.comm.messages import CountingBackend, count, place, plan_of, table
from bigbatch.comm.algorithms.ring import SEGMENT_BYTES
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.trainer.build.job import join_job
from bigbatch.trainer.build.parts import make_parts
from bigbatch.trainer.build.plan import make_plan
from bigbatch.trainer.config.file import load_config

NODES, RANKS_PER_NODE = 256, 8
WORLD_SIZE = NODES * RANKS_PER_NODE
NUM_ELEMENTS = 1 << 26
"""256 MiB of fp32: a leader's part of it is cut into two segments, a shard's into one."""


def counted(algorithm: str, rank: int) -> CountingBackend:
    topology = place(rank, nodes=NODES, ranks_per_node=RANKS_PER_NODE)
    return count(algorithm, topology, [torch.empty(NUM_ELEMENTS, device="meta")])


def hops_of_a_ring(num_ranks: int, num_bytes: int) -> int:
    return 2 * (num_ranks - 1) * ceil(num_bytes / num_ranks / SEGMENT_BYTES)


@pytest.mark.parametrize("rank", [0, 5, WORLD_SIZE - RANKS_PER_NODE, WORLD_SIZE - 1])
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


@pytest.mark.parametrize(("rank", "messages"), [(0, 3), (2, 2), (4, 1), (5, 1)])
def test_messages_of_doubling_over_six_nodes(rank: int, messages: int) -> None:
    """Two beyond the largest power of two hand their sums over, and get the sum of all back."""
    topology = place(rank, nodes=6, ranks_per_node=1)
    assert count("doubling", topology, [torch.empty(100, device="meta")]).messages == messages


@pytest.mark.parametrize("algorithm", ["native", "ring", "hierarchical", "sharded", "doubling"])
def test_groups_at_2048_ranks_are_the_own_node_alone(algorithm: str) -> None:
    groups = [group.ranks for group in counted(algorithm, 13).groups]
    assert groups == ([] if algorithm in ("native", "ring") else [tuple(range(8, 16))])


def test_messages_are_counted_for_the_buffers_of_a_run(tmp_path: Path) -> None:
    config = load_config(["--config", "quickstart", f"--run.directory={tmp_path}"])
    communicator, tuned = join_job(config, ALONE)
    plan = make_plan(config, communicator, num_samples=1024, first_step=0)
    parts = make_parts(config, communicator, plan=plan, tuned=tuned)
    assert parts.reducer.plan.buffers == plan_of("quickstart")


@pytest.mark.long
@pytest.mark.parametrize(
    ("row", "recipe"),
    [
        ("`alexnet_bn_64k`", "imagenet/alexnet_bn_64k"),
        ("the `nus` ones", "imagenet/nus_resnet50_16k"),
        ("all others", "imagenet/resnet50_8k"),
    ],
)
def test_messages_of_the_page_are_those_that_are_counted(row: str, recipe: str) -> None:
    """The numbers of each cell; the generated one says in words what the page's heads say."""
    page = (Path(__file__).parents[3] / "docs/comm.md").read_text()
    (line,) = [line for line in page.splitlines() if line.startswith(f"| {row}")]
    *_, generated = table([recipe], nodes=NODES, ranks_per_node=RANKS_PER_NODE)
    generated = re.sub(r"\d+ collectives, ", "", generated)
    shown, counted = ([re.findall(r"[\d.,]*\d", cell) for cell in each.split("|")[2:-1]] for each in (line, generated))
    assert [cell[: len(page_cell)] for cell, page_cell in zip(counted, shown, strict=True)] == shown


@pytest.mark.long
def test_messages_table_of_a_recipe() -> None:
    """ResNet-50's 25,557,032 gradients in fp16, as jia_resnet50_64k has them."""
    done = run_benchmark("comm.messages", "--nodes", 4, "--recipes", "imagenet/jia_resnet50_64k")
    assert "| jia_resnet50_64k | 3 of 51.2 MB in all | 3 collectives |" in done.stdout, done.stderr
