"""A rank that is to join: what refuses it before it asks, what it looks for, and a loss while the others take it in."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from error_texts import naming
from thread_controls import alone

from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import CommError, ConfigError, PeerLostError
from bigbatch.trainer import joining
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.run.owner import own_claim, take

ENV = replace(ALONE, rank=2, world_size=4, host="n1", joins=True)


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["--comm.backend", "nccl"], CommError, ["rank 2 on n1 cannot join", "nccl cannot go on without a rank"]),
        (["--optimizer.sharded", "true"], ConfigError, ["rank 2 on n1 cannot join", "optimizer.sharded=true"]),
    ],
)
def test_rank_whose_job_cannot_take_it_in_says_so_before_it_asks(
    words: list[str], error: type[Exception], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "choose_device", lambda env, backend: torch.device("cpu"))
    with pytest.raises(error, match=naming(*said)):
        joining.connect_alone(load_config(["--config", "quickstart", *words]), ENV)


def test_rank_whose_job_has_ended_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no owner, or one that has ended, or is reached no more."""
    config = load_config(["--config", "quickstart", "--run.directory", f"{tmp_path}"])
    job: Any = SimpleNamespace(env=ENV, communicator=SimpleNamespace(control=alone()))
    with pytest.raises(PeerLostError, match=naming("rank 2 on n1", "the job that it was to join has ended")):
        joining._ask(config, job, {})
    owner = take(tmp_path, own_claim(store=("127.0.0.1", 1)))
    monkeypatch.setattr(joining, "MORE_SECONDS", -2 * job.communicator.control.timeout_seconds)
    monkeypatch.setattr(joining, "ask_to_join", lambda *arguments, **options: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        joining._ask(config, job, {})

    def refuse(env: object, where: tuple[str, int], **options: object) -> None:
        assert where == ("127.0.0.1", 1)
        raise ConnectionRefusedError("nothing listens")

    monkeypatch.setattr(joining, "ask_to_join", refuse)
    with pytest.raises(PeerLostError, match=naming("rank 2 on n1 reaches no rank of its job", "nothing listens")):
        joining._ask(config, job, {})
    owner.release()
    with pytest.raises(PeerLostError, match="has ended"):
        joining._ask(config, job, {})


def test_return_to_a_checkpoint_makes_no_other_config() -> None:
    config = load_config(["--config", "quickstart"])
    back = replace(config, run=replace(config.run, resume="checkpoints/step-7"))
    facts = joining.facts_of(config, None)
    assert joining.facts_of(back, None) == facts
    assert joining.facts_of(replace(config, run=replace(config.run, seed=7)), None) != facts
    assert facts.keys() == {"release", "config", "data set"}


def test_loss_while_others_take_a_rank_in_is_healed_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = PeerLostError("rank 1 was lost")
    lost.lost_ranks = frozenset({1})

    def let_in(*arguments: object, **options: object) -> None:
        raise lost

    went_on: list[Any] = []
    monkeypatch.setattr(joining, "let_in", let_in)
    monkeypatch.setattr(joining, "find_waiting", lambda *arguments: [])
    monkeypatch.setattr(joining, "go_on", lambda config, job, group, **options: went_on.append((group, options)))
    communicator = SimpleNamespace(rank=0, env=ENV, control=alone(), seats=())
    job: Any = SimpleNamespace(communicator=communicator)
    ownership: Any = SimpleNamespace(number=3)
    config, closed = load_config(["--config", "quickstart"]), list[str]()
    close = lambda: closed.append("closed")  # noqa: E731
    options: Any = {"kept": {"step": 3}, "facts": dict, "since": 0.0, "ownership": ownership, "close": close}
    joining.take_in(config, job, **options)
    ((group, given),) = went_on
    assert (group.control, given["error"], given["joined"], closed) == (communicator.control, lost, [], ["closed"])
    lost.lost_ranks = frozenset()
    with pytest.raises(PeerLostError, match="rank 1 was lost"):
        joining.take_in(config, job, **options)
