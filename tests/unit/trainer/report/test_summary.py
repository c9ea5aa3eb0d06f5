"""The lines of a run before its first step."""

from types import SimpleNamespace
from typing import Any

import torch

from bigbatch.comm.algorithms.hybrid import HybridRow, HybridTable
from bigbatch.comm.algorithms.wire import Wire
from bigbatch.comm.backends.base import Capabilities
from bigbatch.trainer.report.summary import rounding_notes


def summing_by(algorithm: str, *, table: HybridTable | None = None) -> Any:
    """Return parts of a job of 512 ranks on 64 nodes, whose bf16 gradients are rounded at each hop."""
    backend = SimpleNamespace(name="some", world_size=512, capabilities=Capabilities(("cpu",), sums_half_in_fp32=False))
    communicator = SimpleNamespace(
        algorithm=algorithm,
        table=table,
        wire=Wire(in_fp32=False),
        transport=SimpleNamespace(backend=backend),
        connection=SimpleNamespace(topology=SimpleNamespace(num_nodes=64)),
    )
    reducer = SimpleNamespace(buffers=[torch.zeros(1, dtype=torch.bfloat16)])
    return communicator, SimpleNamespace(reducer=reducer)


def test_rounding_notes_go_by_what_sums_the_gradients() -> None:
    assert "up to 64 hops" in rounding_notes(*summing_by("hierarchical"), is_sharded=False)[0]
    assert "up to 512 hops" in rounding_notes(*summing_by("hierarchical"), is_sharded=True)[0]
    assert rounding_notes(*summing_by("doubling"), is_sharded=False) == []
    table = HybridTable((HybridRow(4096, "doubling"), HybridRow(None, "sharded")))
    assert "up to 64 hops" in rounding_notes(*summing_by("hybrid", table=table), is_sharded=False)[0]
