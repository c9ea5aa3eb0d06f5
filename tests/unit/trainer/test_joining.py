"""A rank that is to join: what refuses it before it asks, what it looks for, and a loss while the others take it in."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from error_texts import naming
from thread_controls import alone

from bigbatch.comm.rendezvous.environ import ALONE
from bigbatch.errors import FAILED, LOST, CommError, ConfigError, PeerLostError
from bigbatch.trainer import joining
from bigbatch.trainer.build_run import RunStart
from bigbatch.trainer.config.file import load_config
from bigbatch.trainer.config.schema import Config
from bigbatch.trainer.folder.owner import own_claim, take

ENV = replace(ALONE, rank=2, world_size=4, host="n1", joins_file=Path("no such file"))


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        (["--comm.backend", "mpi"], CommError, ["rank 2 on n1 cannot join", "mpi cannot continue without a rank"]),
        (["--optimizer.sharded", "true"], ConfigError, ["rank 2 on n1 cannot join", "optimizer.sharded=true"]),
    ],
)
def test_rank_whose_job_cannot_take_it_in_says_so_before_it_asks(
    words: list[str], error: type[Exception], said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "choose_device", lambda env, backend: torch.device("cpu"))
    with pytest.raises(error, match=naming(*said)):
        joining.connect_alone(load_config(["--config", "quickstart", *words]), ENV)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(joining, "LOOK_SECONDS", 0.01)
    return SimpleNamespace(env=ENV, communicator=SimpleNamespace(connection=SimpleNamespace(control=alone())))


QUICKSTART = load_config(["--config", "quickstart"])


def config_of(folder: Path) -> Config:
    return replace(QUICKSTART, run=replace(QUICKSTART.run, directory=f"{folder}"))


def test_rank_whose_job_has_ended_ends_well(job: Any, tmp_path: Path) -> None:
    """It may be the only rank of a pod, and another code would restart all pods."""
    take(tmp_path, own_claim(store=("127.0.0.1", 1))).release()
    env = replace(ENV, joins_file=Path("joins"))
    said = naming("rank 2 on n1", "the job has ended without this process")
    with pytest.raises(PeerLostError, match=said) as caught, joining.failing_as_lost_rank(env):
        joining._ask(config_of(tmp_path), job, {})
    assert caught.value.exit_code == 0


@pytest.mark.parametrize(("claim", "said"), [(True, "nothing listens"), (False, "no rank states an address")])
def test_rank_that_reaches_no_other_ends(
    claim: bool, said: str, job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "MORE_SECONDS", 0.05 - 2 * job.communicator.connection.control.timeout_seconds)

    def refuse(env: object, where: tuple[str, int], **options: object) -> None:
        assert where == ("127.0.0.1", 1)
        raise ConnectionRefusedError("nothing listens")

    monkeypatch.setattr(joining, "ask_to_join", refuse)
    owner = take(tmp_path, own_claim(store=("127.0.0.1", 1))) if claim else None
    with pytest.raises(PeerLostError, match=naming("rank 2 on n1 cannot reach a rank of its job", said)):
        joining._ask(config_of(tmp_path), job, {})
    if owner:
        owner.release()


def test_wait_for_an_answer_is_none_of_the_time_without_a_reachable_rank(
    job: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, waits = 0.0, [1000.0, 1000.0, 0.0]
    monkeypatch.setattr(joining, "awake_seconds", lambda: clock)

    def ask(*arguments: object, **options: object) -> str:
        nonlocal clock
        clock += (waited := waits.pop(0))
        if waited:
            raise ConnectionError("it has ended")
        return "admitted"

    monkeypatch.setattr(joining, "ask_to_join", ask)
    monkeypatch.setattr(joining, "newest_claim", lambda folder: own_claim(store=("127.0.0.1", 7)))
    assert joining._ask(config_of(tmp_path), job, {}) == "admitted"  # type: ignore[comparison-overlap]


def test_return_to_a_checkpoint_makes_no_other_config() -> None:
    run, facts = QUICKSTART.run, joining.facts_of(QUICKSTART, None)
    assert joining.facts_of(replace(QUICKSTART, run=replace(run, resume="checkpoints/step-7")), None) == facts
    assert joining.facts_of(replace(QUICKSTART, run=replace(run, seed=7)), None) != facts
    assert facts.keys() == {"release", "config", "data set"}


class Calls:
    """admit_ranks() of rank 1 of two, in which the calls of these names fail; went_on: its calls of heal()."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **errors: Exception) -> None:
        self.went_on: list[tuple[Any, dict[str, Any]]] = []
        self.closed: list[str] = []
        group = SimpleNamespace(control="of the new group", endpoints=SimpleNamespace(all="012"))
        told = SimpleNamespace(group=group, announced={"joined": "rank 2 on n1"})
        results = {"admit": told, "connect_group": "connected", "leave_former_group": None, "abort_connection": None}
        for name, result in results.items():
            play = MagicMock(return_value=result, side_effect=errors.get(name))
            monkeypatch.setattr(joining, name, play)
        monkeypatch.setattr(joining, "former_ranks", lambda former, group, ranks: ranks - {2})
        self.find_join_requests = MagicMock(return_value=[])
        monkeypatch.setattr(joining, "find_join_requests", self.find_join_requests)
        monkeypatch.setattr(joining, "heal", lambda start, error=None, **how: self.went_on.append((error, how)))
        self.control = alone()

    def admit_ranks(self) -> None:
        connection = SimpleNamespace(env=ENV, control=self.control, endpoints=())
        communicator = SimpleNamespace(connection=connection, env=ENV, device=torch.device("cpu"))
        job: Any = SimpleNamespace(communicator=communicator)
        ownership: Any = SimpleNamespace(number=3)
        log: Any = SimpleNamespace(close=lambda: self.closed.append("closed"))
        start = RunStart(config=QUICKSTART, job=job, log=log, state={"step": 3})
        joining.admit_ranks(start, facts=dict, since=0.0, ownership=ownership, went_back=(None, 0))


def lost(*ranks: int, exit_code: int = LOST) -> PeerLostError:
    error = PeerLostError("ranks were lost")
    error.lost_ranks, error.exit_code = frozenset(ranks), exit_code
    return error


@pytest.mark.parametrize(("joins", "closed"), [(1, ["closed"]), (3, [])])
def test_first_rank_ends_its_records_only_before_another_one_takes_the_run_folder_over(
    joins: int, closed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loggers may send for a minute, in which all other ranks wait. The first rank is 2 by the launcher."""
    calls = Calls(monkeypatch)
    calls.find_join_requests.return_value = [SimpleNamespace(endpoint=SimpleNamespace(rank=joins, host="n1"))]
    calls.admit_ranks()
    assert calls.closed == closed


@pytest.mark.parametrize(
    ("failing", "error", "others", "told"),
    [
        ("admit", lost(0), {0}, None),
        ("connect_group", lost(2), set(), "did not join: rank 2 on n1; "),
        ("connect_group", lost(2, exit_code=FAILED), set(), "did not join: rank 2 on n1; "),
        ("connect_group", lost(), set(), "did not join: rank 2 on n1; "),
        ("connect_group", CommError("two ranks share a GPU"), set(), "did not join: rank 2 on n1; "),
        ("leave_former_group", lost(0, 2), {0}, "did not join: rank 2 on n1; "),
    ],
)
def test_former_group_goes_on_after_a_loss_before_all_have_the_state(
    failing: str, error: Any, others: set[int], told: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, **{failing: error})
    calls.admit_ranks()
    ((loss, given),) = calls.went_on
    assert (given.get("group"), loss.lost_ranks, given.get("message")) == (None, others, told)
    assert not given.get("since")


@pytest.mark.parametrize(
    ("failing", "error"),
    [("admit", lost()), ("admit", lost(0, exit_code=FAILED)), ("connect_group", lost(0, exit_code=1))],
)
def test_loss_after_which_none_may_go_on_ends_a_join(
    failing: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(monkeypatch, **{failing: error})
    with pytest.raises(PeerLostError, match="ranks were lost"):
        calls.admit_ranks()
    assert not calls.went_on


def test_store_that_is_lost_while_the_first_rank_looks_who_joins_is_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    calls.find_join_requests.side_effect = RuntimeError("the store has ended")
    monkeypatch.setattr(calls.control.detector, "make_error_and_stop_requests", lambda what, seconds, error: lost(0))
    calls.admit_ranks()
    ((loss, given),) = calls.went_on
    assert (given.get("group"), loss.lost_ranks) == (None, {0})


def test_rank_that_fails_before_it_has_joined_ends_as_a_lost_one() -> None:
    """By another code the launcher would end the others."""
    for path, code in ((Path("joins"), LOST), (None, FAILED)):
        with pytest.raises(CommError) as caught, joining.failing_as_lost_rank(replace(ENV, joins_file=path)):
            raise CommError("refused")
        assert caught.value.exit_code == code
