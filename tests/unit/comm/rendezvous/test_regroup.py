"""The group that forms after a rank failure: its members, the holder of its store, and ranks that are unsure."""

import itertools
import os
import socket
import time
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from error_texts import naming
from thread_groups import env_of, gather, groups_of

from bigbatch.boot import own_kernel, start_ticks
from bigbatch.comm.rendezvous import regroup as module
from bigbatch.comm.rendezvous.job_store import StoreConnections
from bigbatch.comm.rendezvous.regroup import (
    Endpoint,
    Endpoints,
    Group,
    bind_endpoint,
    form_group,
    has_quorum,
    order_of_holders,
    regroup,
)
from bigbatch.errors import CommError, PeerLostError


def endpoint(host: str, *, machine: str = "", port: int = 1, kernel: str = "", born: int | None = 0) -> Endpoint:
    return Endpoint(host, machine or host, "127.0.0.1", port, kernel, os.getpid(), born, 0)


@pytest.mark.parametrize(
    ("hosts", "lost", "holder", "expected"),
    [
        ("a a a a", {0}, 0, [1, 2, 3, 0]),
        ("a a b b", {0}, 0, [2, 3, 1, 0]),  # a's others are nearly always lost, too
        ("a a b b", {0, 2}, 0, [3, 1, 0]),
        ("a b c", {1}, 1, [0, 2, 1]),
    ],
)
def test_next_store_is_on_another_host_than_the_lost_one(
    hosts: str, lost: set[int], holder: int, expected: list[int]
) -> None:
    endpoints = [endpoint(host) for host in hosts.split()]
    assert order_of_holders(endpoints, frozenset(lost), holder=holder) == expected


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_of_two_groups_that_do_not_see_each_other_one_goes_on(num_ranks: int) -> None:
    """Each rank is on side a or b, or has ended, which only A, only B, both or neither have seen."""
    for fates in itertools.product(("a", "b", "A", "B", "AB", ""), repeat=num_ranks):
        of = {side: {rank for rank, fate in enumerate(fates) if side in fate} for side in "abAB"}
        if not (of["a"] and of["b"]):
            continue
        everyone = set(range(num_ranks))
        go_on = [has_quorum(of[side], everyone - of[side] - of[side.upper()]) for side in "ab"]
        assert sum(go_on) <= 1, fates
        if of["A"] == of["B"] and "" not in fates:
            assert sum(go_on) == 1, fates


def test_ranks_of_hosts_that_a_machine_plays_count_as_local_ranks_of_it() -> None:
    """They choose a GPU."""
    hosts = [endpoint("n1", machine="x"), endpoint("n2", machine="y"), endpoint("n3", machine="y")]
    store: Any = SimpleNamespace(seconds=60, set=lambda key, value: None)
    group = form_group(env_of(2, 4), Endpoints(tuple(hosts), socket.socket()), store, holder=0, warn_seconds=1)
    assert (group.env.rank, group.env.world_size, group.env.local_rank, group.env.local_size) == (2, 3, 1, 2)


def test_process_is_known_to_have_ended_on_its_own_kernel_alone() -> None:
    mine = replace(endpoint("here"), kernel=own_kernel(), born=start_ticks(os.getpid()))
    assert mine.has_ended() is False
    assert replace(mine, born=1).has_ended() is True  # another process has its number
    assert replace(mine, kernel="another").has_ended() is None
    assert replace(mine, kernel="").has_ended() is None


def test_other_processes_cannot_take_a_ranks_port() -> None:
    """Linux lets any user bind, and listen on, a port whose socket has SO_REUSEADDR and does not listen."""
    mine, bound = bind_endpoint(env_of(0, 2), towards=None)
    with bound, pytest.raises(OSError, match="in use"):
        socket.create_server((mine.address, mine.port))  # with SO_REUSEADDR


class Job:
    """Ranks as threads, each with its own connection to one store; ended: ranks whose processes have ended."""

    def __init__(self, num_ranks: int, *, ended: Collection[int] = ()) -> None:
        self.connections, self.groups = groups_of(num_ranks, ended=ended)

    def after(self, lost: dict[int, set[int]]) -> dict[int, Group | PeerLostError]:
        """What each of the ranks comes to that calls these lost."""

        def one(rank: int) -> Group | PeerLostError:
            try:
                return regroup(self.groups[rank], frozenset(lost[rank]))
            except PeerLostError as error:
                return error

        with ThreadPoolExecutor(len(lost)) as pool:
            return dict(zip(lost, pool.map(one, lost), strict=True))


def formed(results: dict[int, Group | PeerLostError]) -> list[Group]:
    """The groups of the ranks that continue."""
    return [group for group in results.values() if isinstance(group, Group)]


def test_ranks_whose_store_is_lost_meet_at_the_next_and_miss_who_has_ended() -> None:
    """Rank 1 has ended with rank 0, unnoticed; rank 2 opens the store, and a second loss finds it there."""
    job = Job(5, ended={0, 1})
    members = formed(job.after({rank: {0} for rank in (2, 3, 4)}))
    assert [group.env.rank for group in members] == [0, 1, 2]
    assert [group.control.store.connections._rank for group in members] == [2, 3, 4]  # type: ignore[union-attr]
    assert {group.control.holder for group in members} == {"rank 0"}
    assert gather(members) == [["of 0", "of 1", "of 2"]] * 3
    with ThreadPoolExecutor(2) as pool:
        again = list(pool.map(lambda group: regroup(group, frozenset({1})), (members[0], members[2])))
    assert gather(again) == [["of 0", "of 1"]] * 2


@pytest.mark.parametrize("error", [OSError("no processes are left"), RuntimeError("the store has ended")])
def test_rank_that_cannot_open_the_next_store_leaves_that_to_the_one_after_it(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits longer than the others, who wait for it before they come to the same rank."""
    monkeypatch.setattr(module, "CONNECT_SECONDS", 0.1)
    job, start = Job(4, ended={0}), module.start_store
    for group in job.groups:
        group.control.timeout_seconds = 2.0

    def fail_on_first(listener: socket.socket, secret: bytes, *, rank: int, **options: Any) -> StoreConnections:
        if rank == 1:
            raise error
        return start(listener, secret, rank=rank, **options)

    monkeypatch.setattr(module, "start_store", fail_on_first)
    members = formed(job.after({rank: {0} for rank in (1, 2, 3)}))
    assert [(group.env.rank, group.control.holder) for group in members] == [(rank, "rank 1") for rank in range(3)]


def test_rank_opens_a_second_store_on_its_port_though_connections_of_the_first_remain() -> None:
    """They wait for their end, for up to a minute; every connection of the first store is open when it is killed."""
    job, earlier = Job(2, ended={0}), psutil.Process().children()
    (group,) = formed(job.after({1: {0}}))
    (process,) = set(psutil.Process().children()) - set(earlier)
    endpoint = group.endpoints.all[0]
    with socket.create_connection((endpoint.address, endpoint.port)):
        process.kill()
        process.wait()
        again = regroup(group, frozenset({0}))  # the holder, whose store alone is lost
    assert again.control.store.connections.port == endpoint.port  # type: ignore[union-attr]


def test_rank_whose_port_has_another_owner_by_now_says_so() -> None:
    """Its own store has ended there."""
    job = Job(2, ended={0})
    job.groups[1].endpoints.socket.close()
    own = job.groups[1].endpoints.all[1]
    with socket.create_server((own.address, own.port)), pytest.raises(CommError, match=r"rank 1: .* in use"):
        job.after({1: {0}})


def test_holder_that_has_lost_its_store_alone_is_taken_in() -> None:
    """The store is a process of its own."""
    members = formed(Job(3).after({rank: {0} for rank in range(3)}))
    assert [group.env.rank for group in members] == [0, 1, 2]


def test_holder_in_a_long_step_is_waited_for_after_the_end_of_its_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """It notices the loss at its next sum."""
    monkeypatch.setattr(module, "HOLDER_SECONDS", 0.0)
    job = Job(2)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        job.connections.port = closed.getsockname()[1]
    take, opened = module.start_store, Event()

    def tell_opened(*arguments: Any, **options: Any) -> StoreConnections:
        connections = take(*arguments, **options)
        opened.set()
        return connections

    monkeypatch.setattr(module, "start_store", tell_opened)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(job.after, {1: {0}})
        assert opened.wait(60)
        time.sleep(10 * module.LOOK_SECONDS)
        found = job.after({0: {0}}) | other.result()
    assert [group.env.rank for group in formed(found)] == [0, 1]


def test_rank_without_which_the_others_go_on_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verdict tells it, or, if it was the holder, the list of members in the next store."""
    job = Job(3)
    assert isinstance(job.after({1: {1}})[1], PeerLostError)
    with monkeypatch.context() as patch:
        patch.setattr(module, "HOLDER_SECONDS", 0.0)
        groups = job.after({1: {0}, 2: {0}})
    assert isinstance(groups[1], Group)
    with pytest.raises(PeerLostError, match=naming("rank 0 on here", "continue without it")):
        raise job.after({0: {0}})[0]  # type: ignore[misc]


def test_ranks_that_may_be_the_smaller_group_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder, cut off with its store, and one that was cut off from it; processes that have ended do not count."""
    monkeypatch.setattr(module, "HOLDER_SECONDS", 0.0)
    for job, rank, lost in ((Job(3), 0, {1, 2}), (Job(2), 1, {0})):
        with pytest.raises(PeerLostError, match=naming(f"rank {rank} on here reaches too few of the")) as caught:
            raise job.after({rank: lost})[rank]  # type: ignore[misc]
        assert not caught.value.lost_ranks
    for job, rank, lost in ((Job(3, ended={1, 2}), 0, {1, 2}), (Job(2, ended={0}), 1, {0})):
        assert isinstance(job.after({rank: lost})[rank], Group)


def test_host_that_refuses_connections_to_its_store_shows_that_the_holder_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its kernel is another one: nothing else shows it."""
    monkeypatch.setattr(module, "HOLDER_SECONDS", 0.0)
    came_to = []
    for is_closed in (False, True):
        job = Job(2, ended={0})
        group = job.groups[1]
        unseen = replace(group.endpoints.all[0], kernel="another")
        job.groups[1] = replace(group, endpoints=replace(group.endpoints, all=(unseen, group.endpoints.all[1])))
        if is_closed:
            with socket.create_server(("127.0.0.1", 0)) as closed:
                job.connections.port = closed.getsockname()[1]
        came_to.append(type(job.after({1: {0}})[1]))
    assert came_to == [PeerLostError, Group]


def test_loss_of_the_next_store_is_told_by_the_new_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its holder ends after it has published the members: they are a group, which forms another one."""
    job = Job(3, ended={2})
    ask = StoreConnections.ask

    def fail(connections: StoreConnections, name: str, *parts: str | bytes, seconds: float = 0.0) -> bytes:
        if name == "set" and any(str(part).endswith("host/1") for part in parts):
            raise RuntimeError("the store has ended")
        return ask(connections, name, *parts, seconds=seconds)

    monkeypatch.setattr(StoreConnections, "ask", fail)
    group = job.after({1: {2}})[1]
    assert isinstance(group, Group)
    assert group.endpoints.all == job.groups[1].endpoints.all[:2]
