"""A rank that asks the ranks that go on to take it in: who is let in, who is refused, and the group that forms."""

import json
import os
import socket
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace

import pytest
from error_texts import naming

from bigbatch.boot import own_kernel, start_ticks
from bigbatch.comm.rendezvous import regroup as regroup_module
from bigbatch.comm.rendezvous.control import Control, Joined
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.job_store import JobStore, Line, hold_store
from bigbatch.comm.rendezvous.joining import FIRST_NUMBER, REQUESTS, Admitted, ask_to_join, find_requests, let_in
from bigbatch.comm.rendezvous.regroup import Group, Seat, Seats, regroup
from bigbatch.errors import CommError

SECRET = b"of this test"
FACTS = {"release": "bigbatch 1", "config": "run:\n  seed: 1"}


def env_of(rank: int, world_size: int) -> ProcessEnv:
    return ProcessEnv("torchrun", rank, world_size, rank, world_size, "here", ("127.0.0.1", 1), secret=SECRET)


class Job:
    """The ranks 0, 1 and 3 of four, as threads, after the loss of rank 2; and the ranks that ask to join them."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        listener = socket.create_server(("127.0.0.1", 0))
        self.line = hold_store(listener, SECRET, world_size=4, timeout_seconds=60)
        sockets = [regroup_module._bind("127.0.0.1", 0) for _ in range(4)]
        born = start_ticks(os.getpid()) or 0
        seats = tuple(
            Seat(
                "here", "here", "127.0.0.1", each.getsockname()[1], own_kernel(), os.getpid(), born - (rank == 2), rank
            )
            for rank, each in enumerate(sockets)
        )
        groups = []
        for rank in (0, 1, 3):
            joined = Joined(JobStore(self.line, "job", seconds=60, numbers=range(4)), 0)
            control = Control(env_of(rank, 4), timeout_seconds=60, joined=joined)
            groups.append(Group(env_of(rank, 4), control, Seats(seats, sockets[rank])))
        self.groups = list(pool.map(lambda group: regroup(group, frozenset({2})), groups))

    def ask(self, rank: int, facts: Mapping[str, str] = FACTS) -> "Future[Admitted]":
        limits = {"timeout_seconds": 60.0, "warn_seconds": 20.0}
        where = ("127.0.0.1", self.line.port)
        env = replace(env_of(rank, 4), joins=True)
        return self._pool.submit(ask_to_join, env, where, facts=facts, interface=None, **limits)  # type: ignore[arg-type]

    def find(self, *, least: int = 0, misfit: int = 0) -> list[int]:
        """The ranks that can join, once there are so many. misfit: a number of ranks that cannot share the batch."""
        deadline = time.monotonic() + 60
        while len(found := find_requests(self.groups[0], lambda: FACTS, fits=lambda count: count != misfit)) < least:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return sorted(each.seat.rank for each in found)

    def let_in(self) -> list[Group]:
        found = find_requests(self.groups[0], lambda: FACTS, fits=lambda count: True)
        told = {"step": 7}
        admitted = list(self._pool.map(lambda group: let_in(group, found, told=told), self.groups))
        assert [each.told for each in admitted] == [told] * 3
        return [each.group for each in admitted]


@pytest.fixture
def job() -> Job:
    return Job(ThreadPoolExecutor(8))


def gather(groups: list[Group]) -> list[list[str]]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(lambda group: group.control.gather_text(f"of {group.env.rank}"), groups))


def test_rank_that_joins_has_its_old_number_in_a_group_that_can_lose_ranks_again(job: Job) -> None:
    assert job.find() == []
    asking = job.ask(2)
    assert job.find(least=1) == [2]
    others = job.let_in()
    admitted = asking.result(60)
    groups = [*others[:2], admitted.group, others[2]]
    assert admitted.told == {"step": 7}
    assert [(group.env.rank, group.env.launched_as, group.env.local_rank) for group in groups] == [
        (rank, rank, rank) for rank in range(4)
    ]
    assert {group.env.world_size for group in groups} == {4}
    assert gather(groups) == [[f"of {rank}" for rank in range(4)]] * 4
    assert {group.control.holder for group in groups} == {"rank 0"}
    left = [groups[0], groups[2], groups[3]]
    with ThreadPoolExecutor(3) as pool:
        again = list(pool.map(lambda group: regroup(group, frozenset({1})), left))
    assert gather(again) == [["of 0", "of 1", "of 2"]] * 3
    assert [group.env.launched_as for group in again] == [0, 2, 3]


def test_ranks_wait_for_others_without_which_none_could_share_the_batch(job: Job) -> None:
    first = job.ask(2)
    assert job.find(least=1) == [2]
    assert job.find(misfit=4) == []
    second = job.ask(4)
    assert job.find(least=2, misfit=4) == [2, 4]
    groups = [*job.let_in(), first.result(60).group, second.result(60).group]
    assert sorted(group.env.rank for group in groups) == [0, 1, 2, 3, 4]
    assert gather(groups) == [[f"of {rank}" for rank in range(5)]] * 5


@pytest.mark.parametrize(
    ("rank", "facts", "said"),
    [
        (2, FACTS | {"release": "bigbatch 2"}, "its release is not that of the job: 'bigbatch 2' against 'bigbatch 1'"),
        (2, FACTS | {"config": "run:\n  seed: 2"}, "its config is not that of the job: 'seed: 2' against 'seed: 1'"),
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
    with pytest.raises(CommError, match=naming(f"rank {rank} on here cannot join", said, "go on without it")):
        asking.result()
    assert gather(job.groups) == [["of 0", "of 1", "of 2"]] * 3


def test_rank_that_ends_before_it_is_let_in_is_forgotten(job: Job) -> None:
    line = Line("127.0.0.1", job.line.port, SECRET, rank=FIRST_NUMBER, timeout_seconds=60)
    asked = {"number": FIRST_NUMBER, "facts": FACTS, "seat": asdict(replace(job.groups[0].seats.all[0], rank=2))}
    JobStore(line, REQUESTS, seconds=60).append("asked", json.dumps(asked) + "\n")
    assert job.find() == [2]
    for stream in (*line._idle, line._presence):
        assert stream
        stream.close()
    while job.find():
        time.sleep(0.01)
    groups = job.let_in()
    assert gather(groups) == [["of 0", "of 1", "of 2"]] * 3, "of another generation"
