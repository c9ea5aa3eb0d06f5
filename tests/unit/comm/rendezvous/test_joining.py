"""A rank that asks the ranks that continue to take it in: who is let in, who is refused, and the group that forms."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from error_texts import naming
from thread_groups import PUBLISHED, SECRET, env_of, gather, groups_of

from bigbatch.comm.rendezvous import joining as joining_module
from bigbatch.comm.rendezvous.job_store import JobStore, StoreConnections
from bigbatch.comm.rendezvous.joining import (
    FIRST_JOIN_NUMBER,
    REQUESTS,
    Admitted,
    admit,
    ask_to_join,
    find_requests,
    former_ranks,
    leave_former_group,
)
from bigbatch.comm.rendezvous.regroup import Group, regroup
from bigbatch.errors import CommError, PeerLostError

FACTS = {"release": "bigbatch 1", "config": "run:\n  seed: 1"}


class Job:
    """The ranks 0, 1 and 3 of four, as threads, after the loss of rank 2; and the ranks that ask to join them.

    left: other ranks that are left; the holder of the store is the first of them.
    """

    def __init__(self, pool: ThreadPoolExecutor, left: Sequence[int] = (0, 1, 3)) -> None:
        self._pool = pool
        ended = frozenset(range(4)).difference(left)
        self.connections, groups = groups_of(4, ended=ended, ranks=left, holder=left[0])
        self.groups = list(pool.map(lambda group: regroup(group, ended), groups))

    def ask(
        self, rank: int, facts: Mapping[str, str] = FACTS, *, is_current: Callable[[], bool] = lambda: True
    ) -> "Future[Admitted]":
        limits = {"timeout_seconds": 60.0, "warn_seconds": 20.0, "is_current": is_current}
        where = ("127.0.0.1", self.connections.port)
        env = replace(env_of(rank, 4), joins_file=Path("no such file"))
        return self._pool.submit(ask_to_join, env, where, facts=facts, **limits)  # type: ignore[arg-type]

    def find(self, *, least: int = 0, misfit: int = 0) -> list[int]:
        """The ranks that can join, once there are so many. misfit: a number of ranks that cannot share the batch."""
        deadline = time.monotonic() + 60
        while len(found := find_requests(self.groups[0], lambda: FACTS, fits=lambda count: count != misfit)) < least:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return sorted(each.endpoint.rank for each in found)

    def find_none(self) -> None:
        """Wait until no rank is found: those that had asked have ended."""
        deadline = time.monotonic() + 60
        while self.find():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def ask_as(self, number: int) -> StoreConnections:
        """Ask to be rank 2 under this number."""
        where = "127.0.0.1", self.connections.port
        connections = StoreConnections(*where, SECRET, rank=number, timeout_seconds=60)
        endpoint = asdict(replace(self.groups[0].endpoints.all[0], rank=2))
        asked = {"number": number, "facts": FACTS, "endpoint": endpoint}
        JobStore(connections, REQUESTS, seconds=60).append("asked", json.dumps(asked) + "\n")
        return connections

    def admit(self) -> list[Group]:
        found = find_requests(self.groups[0], lambda: FACTS, fits=lambda count: True)
        told = {"step": 7}
        admitted = list(self._pool.map(lambda group: admit(group, found, announced=told), self.groups))
        assert [each.announced for each in admitted] == [told] * len(self.groups)
        return [each.group for each in admitted]


@pytest.fixture
def job() -> Job:
    return Job(ThreadPoolExecutor(8))


def test_rank_that_joins_has_its_old_number_in_a_group_that_can_lose_ranks_again(job: Job) -> None:
    assert job.find() == []
    asking = job.ask(2)
    assert job.find(least=1) == [2]
    others = job.admit()
    admitted = asking.result(60)
    groups = [*others[:2], admitted.group, others[2]]
    assert admitted.announced == {"step": 7}
    assert [(group.env.rank, group.env.launched_as, group.env.local_rank) for group in groups] == [
        (rank, rank, rank) for rank in range(4)
    ]
    assert {group.env.world_size for group in groups} == {4}
    assert {group.control.master for group in others} == {PUBLISHED}
    assert gather(groups) == [[f"of {rank}" for rank in range(4)]] * 4
    assert {group.control.holder for group in groups} == {"rank 0"}
    left = [groups[0], groups[2], groups[3]]
    with ThreadPoolExecutor(3) as pool:
        again = list(pool.map(lambda group: regroup(group, frozenset({1})), left))
    assert gather(again) == [["of 0", "of 1", "of 2"]] * 3
    assert [group.env.launched_as for group in again] == [0, 2, 3]
    prefixes = [each[0].control.store.prefix for each in (job.groups, groups, again)]  # type: ignore[union-attr]
    assert len(set(prefixes)) == 3
    assert len(set(map(len, prefixes))) == 1, "each request has it, also after a thousand losses"


def test_ranks_wait_for_others_without_which_none_could_share_the_batch(job: Job) -> None:
    first = job.ask(2)
    assert job.find(least=1) == [2]
    assert job.find(misfit=4) == []
    second = job.ask(4)
    assert job.find(least=2, misfit=4) == [2, 4]
    assert len(job.find(least=1, misfit=5)) == 1, "one of them can join without the other"
    groups = [*job.admit(), first.result(60).group, second.result(60).group]
    assert sorted(group.env.rank for group in groups) == [0, 1, 2, 3, 4]
    assert gather(groups) == [[f"of {rank}" for rank in range(5)]] * 5


def test_ranks_that_join_together_are_answered_by_a_request_each(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer names all ranks: one request for hundreds that join would be longer than the store takes."""
    sent: list[str] = []
    ask = StoreConnections.ask

    def record(connections: StoreConnections, *parts: str, **limits: float) -> bytes:
        sent.append(str(parts))
        return ask(connections, *parts, **limits)

    monkeypatch.setattr(StoreConnections, "ask", record)
    asking = [job.ask(2), job.ask(4)]
    job.find(least=2)
    groups = [*job.admit(), *(each.result(60).group for each in asking)]
    assert sorted(group.env.rank for group in groups) == [0, 1, 2, 3, 4]
    assert [each.count("announced") for each in sent if "answer/" in each and "announced" in each] == [1, 1]


@pytest.mark.parametrize(
    ("rank", "facts", "said"),
    [
        (2, FACTS | {"release": "bigbatch 2"}, "its release differs from the job's: 'bigbatch 2' against 'bigbatch 1'"),
        (2, FACTS | {"config": "run:\n  seed: 2"}, "its config differs from the job's: 'seed: 2' against 'seed: 1'"),
        (1, FACTS, f"process {os.getpid()} on here is rank 1"),
    ],
    ids=["release", "config", "place"],
)
def test_rank_that_cannot_join_is_told_why_and_the_others_are_not_disturbed(
    rank: int, facts: dict[str, str], said: str, job: Job
) -> None:
    asking = job.ask(rank, facts)
    while not asking.done():
        assert job.find() == []
    with pytest.raises(CommError, match=naming(f"rank {rank} on here cannot join", said, "continue without it")):
        asking.result()
    assert gather(job.groups) == [["of 0", "of 1", "of 2"]] * 3


def test_rank_that_ends_after_it_was_found_is_forgotten(job: Job) -> None:
    connections = job.ask_as(FIRST_JOIN_NUMBER)
    assert job.find() == [2]
    connections.close()
    job.find_none()
    assert gather(job.admit()) == [["of 0", "of 1", "of 2"]] * 3, "of another generation"


@pytest.mark.parametrize("has_come", [False, True])
def test_loss_while_ranks_agree_on_a_join_parts_none_of_the_others(has_come: bool, job: Job) -> None:
    """The third rank is lost before the others know, or between their reads of the answer."""
    asking = job.ask(2)
    job.find(least=1)
    found = find_requests(job.groups[0], lambda: FACTS, fits=lambda count: True)

    def outcome(group: Group) -> str:
        try:
            return admit(group, found, announced={}).group.control.store.prefix  # type: ignore[union-attr]
        except PeerLostError as error:
            return f"{sorted(error.lost_ranks)}"

    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(outcome, group) for group in job.groups[:2]]
        control = job.groups[2].control
        if has_come:
            control.next_key()  # of the answer
            control.collect_text("", what="")
            asked[1].result()
        control.detector.publish_crash()
        first, second = [each.result() for each in asked]
    assert first == second, "all enter the new group, or none"
    if has_come:
        asking.result(60)
    else:
        assert first == "[2]"
        assert not asking.done()
        answer_nothing_more(job, asking)


def answer_nothing_more(job: Job, asking: "Future[Admitted]") -> None:
    """End a rank that would ask for ever."""
    store = JobStore(job.connections, REQUESTS, seconds=60)
    for line in store.get("asked").splitlines():
        store.set(f"answer/{json.loads(line)['number']}", json.dumps({"refused": "the test ends"}))
    assert isinstance(asking.exception(60), CommError)


@pytest.mark.parametrize("left", [(1,), (0, 1, 3)])
def test_rank_that_is_lost_before_it_has_the_state_has_no_vote(left: Sequence[int]) -> None:
    """Its process lives, so in the new group the only rank with the state could not continue without it."""
    job = Job(ThreadPoolExecutor(8), left)
    lost = 0 if left == (1,) else 2
    asking = job.ask(lost)
    job.find(least=1)
    others = job.admit()
    asking.result(60).leave()

    def go_back(former: Group, group: Group) -> Group:
        with pytest.raises(PeerLostError) as caught:
            leave_former_group(group)
        assert caught.value.lost_ranks == {lost}
        ranks = former_ranks(former, group, caught.value.lost_ranks)
        assert not ranks
        return regroup(former, ranks)

    with ThreadPoolExecutor(3) as pool:
        job.groups = list(pool.map(go_back, job.groups, others))
    assert gather(job.groups) == [[f"of {rank}" for rank in range(len(left))]] * len(left)
    again = job.ask(lost)
    assert job.find(least=1) == [lost]
    others = job.admit()
    groups = sorted([*others, again.result(60).group], key=lambda group: group.env.rank)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(leave_former_group, groups))
    assert gather(groups) == [[f"of {rank}" for rank in range(len(left) + 1)]] * (len(left) + 1)


def test_requests_that_another_release_has_written_disturb_none(job: Job) -> None:
    store = JobStore(job.connections, REQUESTS, seconds=60)
    endpoint = asdict(job.groups[0].endpoints.all[0])
    lines = ["{", "7", "[]", '{"number": "x"}', "{}"]
    lines += [json.dumps({"number": 5 << 20, "endpoint": endpoint | {"rank": 2, "cell": 3}, "facts": FACTS})]
    lines += [json.dumps({"number": 6 << 20, "endpoint": {}, "facts": None})]
    store.append("asked", "\n".join(lines) + "\n")
    assert job.find() == []
    assert json.loads(store.get(f"answer/{5 << 20}")) == {"refused": "its request is of another format"}
    assert "its release differs from the job's" in json.loads(store.get(f"answer/{6 << 20}"))["refused"]


def test_newest_request_of_a_rank_counts(job: Job) -> None:
    """The former one's process may seem to live."""
    connected = [job.ask_as(number) for number in (FIRST_JOIN_NUMBER, FIRST_JOIN_NUMBER + 1)]
    found = find_requests(job.groups[0], lambda: FACTS, fits=lambda count: True)
    assert [each.number for each in found] == [FIRST_JOIN_NUMBER + 1]
    assert len(connected) == 2, "they live"


def test_store_keeps_no_request_and_no_answer_of_a_process_that_has_ended(job: Job) -> None:
    """A job that loses ranks for days takes in one after another."""
    store = JobStore(job.connections, REQUESTS, seconds=60)
    for _ in range(2):
        asking = job.ask(2)
        job.find(least=1)
        job.admit()
        number = json.loads(store.get("asked").splitlines()[-1])["number"]
        asking.result(60).leave()
        deadline = time.monotonic() + 60
        while store.get("asked") or store.check([f"answer/{number}"]):
            assert time.monotonic() < deadline
            assert job.find() == []
    waiting = job.ask(2)
    assert job.find(least=1) == [2]
    assert len(store.get("asked").splitlines()) == 1, "those of processes that wait stay"
    answer_nothing_more(job, waiting)


def test_rank_asks_no_longer_at_a_store_that_the_others_have_left(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining_module, "LOOK_SECONDS", 0.01)
    asking = job.ask(2, is_current=lambda: False)
    with pytest.raises(ConnectionError, match="its ranks use another store by now"):
        asking.result(60)
    job.find_none()
