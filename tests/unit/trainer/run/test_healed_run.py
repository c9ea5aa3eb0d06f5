"""The run that follows a loss in the same process, without other ranks."""

import os
import signal
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from thread_controls import alone

from bigbatch.errors import PeerLostError
from bigbatch.trainer import train
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.step.stop_request import StopRequest
from bigbatch.trainer.training_run import why_not_healing


def job_of(world_size: int) -> Any:
    """A job that can heal."""
    communicator = SimpleNamespace(world_size=world_size, endpoints=(), device=torch.device("cpu"), control=alone())
    return SimpleNamespace(communicator=communicator, env=SimpleNamespace(joins=False))


done: list[str] = []


class Run:
    """A run that loses a rank, and its successor, which records what asked it to stop."""

    def __init__(self, *arguments: Any, kept: Any, stop: StopRequest | None = None, **settings: Any) -> None:
        self._kept, self.parts = kept, SimpleNamespace(stop=stop or StopRequest())
        self.listed = None
        self.loop = SimpleNamespace(copy_state=lambda: {"step": 3})
        done.append("made")

    def run(self, *, came_back: str, since: float | None, wants_join: Any) -> Any:
        if self._kept is None:
            raise PeerLostError("rank 1 on n1 was lost")
        return {"asked by": self.parts.stop.signal_name}


def test_run_that_cannot_heal_says_what_prevents_it() -> None:
    assert "nccl cannot go on without a rank" in why_not_healing("nccl")
    assert "process group of the script's own" in why_not_healing("tcp")


def test_stop_signal_during_healing_stops_the_next_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def heal(*arguments: Any, kept: Any, **settings: Any) -> Any:
        done.append("healed")
        os.kill(os.getpid(), signal.SIGINT)
        return SimpleNamespace(job=job_of(1), state=kept, told="lost: rank 1 on n1", since=None)

    done.clear()
    monkeypatch.setattr(train, "heal", heal)
    ownership: Any = SimpleNamespace(owner=None)
    config, job = load_config(["--config", "quickstart"]), job_of(2)
    groups = [job.communicator]
    found = train._run_agreed(Run, config, job, ownership, groups=groups, listed=None)  # type: ignore[arg-type]
    assert done == ["made", "healed", "made"]
    assert [group.world_size for group in groups] == [2, 1], "by which running out of memory is explained"
    assert found == {"asked by": "SIGINT"}
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)
