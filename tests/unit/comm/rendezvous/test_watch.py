"""The watch of operations, look by look: two or three ranks that share a store in one process."""

import re

import pytest
from error_texts import naming
from stalled_ranks import let_time_pass, look, ranks

from bigbatch.awake import awake_seconds
from bigbatch.comm.rendezvous import control, hang_report, watch


@pytest.fixture(autouse=True)
def recorded_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flight recorder of this process may hold what other tests did."""
    monkeypatch.setattr(hang_report, "dump_flight", str)


@pytest.fixture(autouse=True)
def standing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time passes only where a test says so, so a busy machine makes no rank late."""
    now = awake_seconds()
    for module in (watch, control):
        monkeypatch.setattr(module, "awake_seconds", lambda: now)


def test_watch_watches_what_is_done_beside_a_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """First one group is late, then another: each time the missing ranks are named again."""
    first, second = ranks(2)
    passed = [0.0]
    now = awake_seconds()
    for module in (watch, control):
        monkeypatch.setattr(module, "awake_seconds", lambda: now + passed[0])
    for label in ("these groups", "those groups"):
        with first.watch.during(label):
            passed[0] += 4.5
            look(first)
            passed[0] += 2.5
            look(first, second)
        with second.watch.during(label):
            pass
        assert re.search(naming(label, "rank 1 on node1 has not started"), first.said[-1])
    assert len(first.said) == 2


def test_watch_looks_at_the_queue_before_what_is_done_beside_it() -> None:
    first, _ = ranks(2)
    with first.watch.during("groups"):
        first.waits(3, seconds=9)
        look(first, first)
        assert [(each.number, each.label) for each in first.control.detector.log.state.stalls] == [
            (3, first.pending.label)  # type: ignore[union-attr]
        ]
        first.pending = None
        assert first.watch._oldest() is not None
    assert first.watch._oldest() is None


def test_watch_prints_nothing_while_no_rank_waits_long() -> None:
    first, second = ranks(2)
    first.waits(3, seconds=3.9)
    for _ in range(3):
        look(first, second)
    assert first.said == second.said == []


def assert_matches(text: str, pattern: str) -> None:
    assert re.match(pattern, text), text


def test_watch_blames_no_rank_if_all_ranks_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    both = ranks(2)
    for rank in both:
        rank.waits(1, seconds=5)
    look(*both)
    let_time_pass(monkeypatch)
    look(*both)
    assert all(": all ranks are in it (the job" in rank.said[0] for rank in both)


def test_rank_that_has_passed_the_operation_is_not_late() -> None:
    first, second = ranks(2)
    first.waits(1, seconds=5)
    second.waits(1, seconds=5)
    look(first, second)
    second.pending = None  # through already
    look(second)
    second.waits(2, seconds=0.1)
    look(second)
    assert second.said == []


def test_ranks_outside_a_group_are_not_late_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 are in it, and 1 is late; 2 and 3 have a group of their own, and have not come so far either."""
    first, late, third, fourth = ranks(4)
    first.waits(3, seconds=5, group=(0, 1))
    late.waits(2, seconds=0.1)
    fourth.waits(2, seconds=0.1)
    look(first, late, third, fourth)
    let_time_pass(monkeypatch)
    look(first, late, third, fourth)
    assert ": rank 1 on node1 has not started it (the job" in first.said[0]
    assert_matches(late.said[0], "rank 1 on node1 is late")
    assert third.said == fourth.said == []


def test_two_groups_that_wait_at_once_name_the_late_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank counts its own operations, so that both groups wait in their third."""
    first, second, third, fourth = ranks(4)
    first.waits(3, seconds=5, group=(0, 1))
    third.waits(3, seconds=4.5, group=(2, 3))
    second.waits(2, seconds=0.1)
    fourth.waits(2, seconds=0.1)
    look(first, second, third, fourth)
    let_time_pass(monkeypatch)
    look(first, second, third, fourth)
    assert ": rank 1 on node1 has not started it (the job" in first.said[0]
    assert ": rank 3 on node3 has not started it (the job" in third.said[0]
    assert_matches(second.said[0], "rank 1 on node1 is late")
    assert_matches(fourth.said[0], "rank 3 on node3 is late")
