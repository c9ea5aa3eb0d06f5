"""NCCL that is played by another library of torch's: by fake groups, which do not communicate, or by gloo's, which do.

As NCCL does: it connects when it is initialized, where a GPU is named, and parts of the world are split from it then,
all at once; messages run one after another, each batch to its end, so that two ranks which both send first would wait
for each other; within a capture nothing connects, and (see recorded_graph) nothing travels.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from recorded_graph import is_recording
from torch.testing._internal.distributed.fake_pg import FakeStore

from bigbatch.comm.backends import process_groups


class PlayedOptions:
    """What torch lets one choose among a group of NCCL's."""

    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self._timeout = timedelta(minutes=10)


class PlayedNccl:
    """torch.distributed, in which each group is one of carrier's, "fake" or "gloo"; what is asked is written down.

    Use it together with PlayedGpus.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, carrier: str = "fake") -> None:
        self.asked: list[tuple[str, Any]] = []
        self.bound: torch.device | None = None
        """The GPU of the default group: with one, NCCL is connected from the start, and its groups can be split."""
        self.no_group: Any = dist.GroupMember.NON_GROUP_MEMBER
        """What a rank gets of a split in which it has no part."""
        self._carrier = carrier
        self._init, self._new_group, self._barrier = dist.init_process_group, dist.new_group, dist.barrier
        self._batch = dist.batch_isend_irecv
        monkeypatch.setattr(dist, "init_process_group", self._connect)
        monkeypatch.setattr(dist, "new_group", self._make)
        monkeypatch.setattr(dist, "split_group", self._split)
        monkeypatch.setattr(dist, "barrier", self._meet)
        monkeypatch.setattr(dist, "batch_isend_irecv", self._exchange)
        monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=PlayedOptions), raising=False)
        monkeypatch.setattr(process_groups, "_bound_gpu", lambda: self.bound)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_recording)

    def of(self, what: str) -> list[Any]:
        """What it was asked to do, of one kind."""
        return [detail for each, detail in self.asked if each == what]

    def _note(self, *asked: tuple[str, Any]) -> None:
        assert not is_recording(), f"{asked} within a capture"
        self.asked += asked

    def _watchdog(self) -> str | None:
        """What a group reads when it is made: 3 lets torch end the process after an error, 0 does not."""
        return os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")

    def _connect(
        self, backend: str, *, device_id: torch.device | None, store: Any, pg_options: Any = None, **options: Any
    ) -> None:
        self._note(("init", device_id), ("store", store), ("options", pg_options), ("watchdog", self._watchdog()))
        self._init(self._carrier, store=FakeStore() if self._carrier == "fake" else store, **options)
        self.bound = device_id

    def _make(self, ranks: Sequence[int], *, backend: str, pg_options: Any = None, **options: Any) -> Any:
        self._note(("new", ranks), ("options", pg_options), ("watchdog", self._watchdog()))
        return self._new_group(ranks, backend=self._carrier, **options)

    def _split(self, parent: Any, families: Sequence[Sequence[int]], *, timeout: timedelta) -> Any:
        assert len({rank for ranks in families for rank in ranks}) == sum(map(len, families)), "they overlap"
        self._note(("split", families), ("watchdog", self._watchdog()))
        made = [self._new_group(ranks, backend=self._carrier, timeout=timeout) for ranks in families]
        mine = [group for group, ranks in zip(made, families, strict=True) if dist.get_rank() in ranks]
        return mine[0] if mine else self.no_group

    def _meet(self, *, group: Any, device_ids: list[int] | None = None) -> None:
        self._note(("barrier", device_ids))
        if self._carrier != "fake":
            self._barrier(group=group)

    def _exchange(self, hops: list[dist.P2POp]) -> list[Any]:
        for work in self._batch(hops):
            work.wait()
        return []
