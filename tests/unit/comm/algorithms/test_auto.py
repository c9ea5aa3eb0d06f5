"""What auto becomes: by backend, by a table, and in a communicator."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bigbatch.comm.algorithms.auto import choose_algorithm
from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable
from bigbatch.comm.backends.base import Capabilities
from bigbatch.comm.connection import connect
from bigbatch.comm.rendezvous.environ import ALONE

BY_SIZE = HybridTable((HybridRow(4096, "doubling"), HybridRow(None, "sharded")))
ONE = HybridTable((HybridRow(None, "ring"),))


def named(name: str) -> Any:
    """A transport of eight ranks."""
    return SimpleNamespace(name=name, world_size=8, capabilities=Capabilities(("cpu",), has_messages=name != "horovod"))


@pytest.mark.parametrize(
    ("backend", "expected"),
    [("nccl", "native"), ("horovod", "native"), ("tcp", "hierarchical"), ("mpi", "hierarchical")],
)
def test_without_a_table_the_backend_decides(backend: str, expected: str) -> None:
    choice = choose_algorithm(named(backend), table=None)
    assert choice.algorithm == expected
    assert choice.why


def test_a_table_decides_before_the_backend() -> None:
    by_size, one = (choose_algorithm(named("nccl"), table=table, table_from="FILE") for table in (BY_SIZE, ONE))
    assert by_size == ("hybrid", "FILE: doubling up to 4,096 bytes; sharded above")
    assert one == ("ring", "FILE: ring at any size")


@pytest.mark.parametrize(
    ("options", "expected", "is_said"),
    [
        ({}, "native", True),  # one rank
        ({"algorithm": "auto"}, "native", True),
        ({"algorithm": "auto", "table": BY_SIZE}, "hybrid", True),
        ({"algorithm": "ring", "table": BY_SIZE}, "ring", False),
    ],
)
def test_a_communicator_names_what_was_chosen(options: dict[str, Any], expected: str, is_said: bool) -> None:
    alone = connect(env=ALONE, device=torch.device("cpu"), **options)
    assert alone.algorithm == expected
    assert bool(alone.why) is is_said
