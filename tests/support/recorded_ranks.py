"""One rank of several whose sums are those of torch's fake process group: nothing travels, but all is asked for."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from recorded_gpu import GPU
from torch.testing._internal.distributed.fake_pg import FakeStore

from bigbatch.comm.backends.torch_distributed import TorchDistributedBackend
from bigbatch.comm.communicator import Communicator, make_communicator
from bigbatch.comm.connection import Connection
from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.comm.rendezvous.topology import make_topology
from bigbatch.comm.transport import make_transport

NCCL_HOSTS = ("a", "a", "b", "b")
STAGED_HOSTS = ("a", "b", "c", "d")
"""None of which has two ranks, which would have to share memory."""


@contextmanager
def first_rank(*, algorithm: str, library: str = "nccl", heals: bool = False) -> Iterator[Communicator]:
    """The first of four ranks with a GPU each: by NCCL on two hosts, or on four by gloo and the host's memory."""
    hosts = STAGED_HOSTS if library == "gloo" else NCCL_HOSTS
    env = replace(ALONE, world_size=len(hosts), host="a")
    new_group = dist.new_group

    def fake_group(ranks: Sequence[int], **_: Any) -> Any:
        return new_group(ranks, backend="fake")

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=len(hosts))
    try:
        with patch.object(dist, "new_group", fake_group), patch.object(dist, "barrier", lambda **_: None):
            control: Any = SimpleNamespace(
                gather_text=lambda text, **_: [text] * len(hosts),
                gather=lambda value, **_: [value] * len(hosts),
                agree=lambda what, text, **_: None,
                timeout_seconds=8,
                detector=SimpleNamespace(
                    make_error_and_stop_requests=None,
                    check_peers=lambda label, seconds: None,  # asked where a wait takes long, as on a busy machine
                    raise_if_failed_or_store_lost=lambda label, seconds: None,
                    bounded=lambda label, operation: operation(),
                    begin=lambda: None,
                ),
            )
            backend = TorchDistributedBackend(env, control, library=library, device=GPU, heals=heals)
            connection = Connection(env, control, backend, make_topology(hosts, rank=0))
            yield make_communicator(make_transport(connection, device=GPU), algorithm)
            backend.close()
    finally:
        dist.destroy_process_group()
