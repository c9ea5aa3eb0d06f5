"""The transition table of failures: every order of up to six events of a job of three ranks.

Each rank has read a part of the one log. An event happens to the job, or lets one rank look: it reads the whole log,
and appends what the table demands. Orders that lead to the same job are followed once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest

from bigbatch.comm.rendezvous import failures, limits
from bigbatch.comm.rendezvous.failures import LATE, LOST, Event, JobState, after, answer, describe

RANKS = range(3)
NONE: frozenset[int] = frozenset()
AGED = limits.ROLL_CALL_SECONDS + limits.LINGER_SECONDS


@dataclass(frozen=True)
class Job:
    """Three ranks and their log. log: events that were appended, in order; read: of these, how many each has read.

    ages: for each rank, the seconds for which it has known of the failure. said: what each has appended.
    """

    log: tuple[Event, ...] = ()
    read: tuple[int, ...] = (0, 0, 0)
    ages: tuple[float, ...] = (0.0, 0.0, 0.0)
    dead: frozenset[int] = NONE
    """Their processes have ended, which the store tells."""
    stopped: frozenset[int] = NONE
    """They are silent, and the store does not know why."""
    waiting: frozenset[int] = NONE
    """In the same sum."""
    left: frozenset[int] = NONE
    """They have passed the last barrier."""

    def state(self, rank: int) -> JobState:
        """What a rank knows; the time is that since it has known of the failure."""
        return known(self.log[: self.read[rank]], self.dead)

    @property
    def live(self) -> frozenset[int]:
        """Ranks that act."""
        return frozenset(RANKS) - self.dead - self.stopped - self.left

    def append(self, *event: object) -> "Job":
        return replace(self, log=(*self.log, event))


@cache
def known(log: tuple[Event, ...], dead: frozenset[int]) -> JobState:
    """What a rank knows that has read these events."""
    return after(known(log[:-1], dead), log[-1:], now=0.0) if log else JobState(len(RANKS), gone=dead)


def look(job: Job, rank: int) -> Job:
    """A rank reads the log, and writes what the table demands, until it demands nothing."""
    while True:
        job = replace(job, read=(*job.read[:rank], len(job.log), *job.read[rank + 1 :]))
        event = answer(job.state(rank), rank, now=job.ages[rank], is_waiting=rank in job.waiting, is_watching=True)
        if event is None:
            return job
        text = [describe(job.state(rank), event[2], str)] if event[0] == "verdict" else []
        assert job.log.count(event) == 0, "nothing is said twice"
        job = job.append(*event, *text)


def following(job: Job) -> Iterator[Job]:
    """The job after each event that is possible now."""
    for rank in RANKS:
        if rank in job.live:
            yield look(job, rank)
            yield replace(job, dead=job.dead | {rank})
            yield replace(job, stopped=job.stopped | {rank})
            if not job.state(rank).verdict and rank not in job.state(rank).crashed:
                yield replace(job.append("crashed", rank, 1), stopped=job.stopped | {rank})
            if rank in job.waiting and not job.state(rank).cause:  # its wait fails, by itself or by its limit
                yield look(job.append("failed", rank, LOST), rank)
                yield look(job.append("failed", rank, LATE), rank)
            if rank not in job.waiting:
                yield replace(job, waiting=job.waiting | {rank})
            if not job.log or job.log[-1][0] == "ended":
                yield replace(job.append("ended", rank), left=job.left | {rank})
            if job.state(rank).cause and not job.state(rank).verdict:
                yield replace(job, ages=(*job.ages[:rank], AGED, *job.ages[rank + 1 :]))


@pytest.fixture(scope="module", params=[4, pytest.param(6, marks=pytest.mark.long)])
def jobs(request: pytest.FixtureRequest) -> set[Job]:
    """All jobs after up to so many events."""
    found, newest = {Job()}, {Job()}
    for _ in range(request.param):
        newest = {each for job in newest for each in following(job)} - found
        found |= newest
    return found


def settled(job: Job) -> Job:
    """The job after all live ranks have come to the sum and had their time."""
    for _ in range(4):
        for rank in job.live:
            job = look(replace(job, waiting=job.waiting | {rank}), rank)
            if job.state(rank).cause:
                job = replace(job, ages=(*job.ages[:rank], AGED, *job.ages[rank + 1 :]))
    return job


def lost_by(job: Job) -> frozenset[int] | None:
    """The ranks that the first verdict of the log names."""
    return next((frozenset(event[2]) for event in job.log if event[0] == "verdict"), None)


def test_events_that_are_read_together_mean_what_they_mean_one_by_one(jobs: set[Job]) -> None:
    for job in jobs:
        assert after(JobState(len(RANKS)), job.log, now=0.0) == known(job.log, NONE), job.log


@pytest.mark.parametrize("name", ["alive", "heard", "ended"])
def test_what_all_ranks_log_together_copies_their_set_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    num_copies = 0

    def counted(state: JobState, **changes: object) -> JobState:
        nonlocal num_copies
        num_copies += 1
        return replace(state, **changes)  # type: ignore[arg-type]

    monkeypatch.setattr(failures, "replace", counted)
    state = after(JobState(2048), [(name, rank) for rank in range(2048)], now=0.0)
    assert getattr(state, name) == frozenset(range(2048))
    assert num_copies == 1


def test_verdict_is_one_and_names_no_rank_that_answers_or_has_ended(jobs: set[Job]) -> None:
    num_verdicts = 0
    for job in jobs:
        lost = lost_by(job)
        if lost is None:
            continue
        num_verdicts += 1
        number = next(at for at, event in enumerate(job.log) if event[0] == "verdict")
        before = job.log[:number]
        ended = {event[1] for event in before if event[0] == "ended"}
        answered = {event[1] for event in before if event[0] in ("alive", "failed")}
        caller = next(event[1] for event in before if event[0] == "failed")
        assert not lost & ended
        assert not lost & answered - job.dead - {caller}
        assert {rank for rank in RANKS if rank not in answered | ended} <= lost
        for rank in job.live:
            known = job.state(rank).verdict
            assert known is None or known.lost == lost
    assert num_verdicts > 100
    assert {lost_by(job) for job in jobs} >= {None, NONE, frozenset({0}), frozenset({1}), frozenset({1, 2})}


def test_each_live_rank_comes_to_the_verdict_after_a_failure(jobs: set[Job]) -> None:
    """Whatever else fails meanwhile."""
    for job in {replace(job, waiting=frozenset(RANKS)) for job in jobs if job.live}:
        after_all = settled(job)
        if any(event[0] == "failed" for event in after_all.log):
            assert lost_by(after_all) is not None
            assert all(after_all.state(rank).verdict is not None for rank in job.live)
            assert job.stopped or all(after_all.state(rank).may_leave(rank, AGED) for rank in job.live)
        if not job.log and job.dead:  # a dead process alone suffices: each live rank sees it
            assert lost_by(after_all) == job.dead | job.stopped


def test_only_the_late_are_named_after_a_time_limit() -> None:
    """A rank that computes is not in the sum that the others wait for; after a failure it is not a lost one."""
    for cause, expected in ((LATE, {2}), (LOST, NONE)):
        job = replace(Job(), waiting=frozenset({0, 1})).append("failed", 0, cause)
        for rank in (2, 1, 0):
            job = look(job, rank)
        assert lost_by(job) == (None if cause == LATE else NONE), "it may still answer"
        job = look(replace(job, ages=(AGED, AGED, AGED)), 0)
        assert lost_by(job) == expected


@pytest.mark.parametrize(
    ("cause", "waiting", "answered", "is_brief"),
    [
        (LATE, {0, 1}, {1}, True),  # only the rank is missing that had not come for long
        (LATE, {0, 1}, set(), False),  # rank 1 waits, and its answer may be late
        (LATE, {1}, {1}, False),  # of an operation in which the caller does not wait
        (LOST, {0, 1}, {1}, False),
    ],
)
def test_rank_that_had_not_come_for_long_is_not_waited_for(
    cause: str, waiting: set[int], answered: set[int], is_brief: bool
) -> None:
    job = replace(Job(), waiting=frozenset({0, 1}), stopped=frozenset({2}))
    job = job.append("waits", 0, 6, "an earlier sum", (0, 1))
    for rank in waiting:
        job = job.append("waits", rank, 7, "a sum", None)
    job = job.append("failed", 0, cause)
    for rank in answered:
        job = look(job, rank)
    assert lost_by(look(replace(job, ages=(0.9 * limits.ANSWER_SECONDS, 0, 0)), 0)) is None
    brief = lost_by(look(replace(job, ages=(limits.ANSWER_SECONDS, 0, 0)), 0))
    assert brief == (frozenset({2}) if is_brief else None)
    assert lost_by(look(replace(job, ages=(AGED, 0, 0)), 0)) == {0, 1, 2} - answered - {0}


def test_rank_that_counts_and_is_silent_is_replaced_and_is_not_called_dead() -> None:
    job = look(look(replace(Job(), stopped=frozenset({1})).append("failed", 1, LOST), 0), 2)
    job = look(replace(job, ages=(AGED, 0.0, 0.0)), 0)
    assert job.log[-2][:3] == ("verdict", 0, (1,))
    assert "no verdict from [1]" in str(job.log[-2])


def test_answer_that_a_rank_gives_beside_its_own_failure_does_not_count() -> None:
    """Its watch had read the log before the failure was in it."""
    state = known((("failed", 0, LOST), ("crashed", 1, None), ("alive", 1), ("alive", 2)), NONE)
    assert state.missing == {1}
