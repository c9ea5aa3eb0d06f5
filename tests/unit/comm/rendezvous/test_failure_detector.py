"""The failure detector: many ranks over one store, in a time of their own that no busy machine stretches."""

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from threading import Event, Lock, get_ident

import pytest
from torch.distributed import HashStore

from bigbatch.comm.rendezvous import limits
from bigbatch.comm.rendezvous.bounded_store import News
from bigbatch.comm.rendezvous.failure_detector import FailureDetector
from bigbatch.comm.rendezvous.failure_log import LOG
from bigbatch.comm.rendezvous.failures import LATE, LOST


class Clock:
    """A time that continues when all threads sleep, to where the first of them wakes."""

    def __init__(self) -> None:
        self.now, self._num_awake = 0.0, 0
        self._sleepers: list[tuple[float, int, Event]] = []
        self._own: set[int] = set()
        self._system_sleep = time.sleep
        self._lock = Lock()

    def seconds(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        if get_ident() not in self._own:  # a thread that another test has left, which would be counted as one of these
            self._system_sleep(seconds)
            return
        woken = Event()
        with self._lock:
            heapq.heappush(self._sleepers, (self.now + seconds, id(woken), woken))
            self._rest()
        assert woken.wait(timeout=250), "a thread does not continue"

    def _rest(self) -> None:
        self._num_awake -= 1
        if not self._num_awake and self._sleepers:
            self.now = self._sleepers[0][0]
            while self._sleepers and self._sleepers[0][0] <= self.now:
                self._num_awake += 1
                heapq.heappop(self._sleepers)[2].set()

    def run(self, jobs: list[Callable[[], None]]) -> None:
        """Run jobs side by side, each of which is one thread."""
        self._num_awake = len(jobs)

        def one(job: Callable[[], None]) -> None:
            self._own.add(get_ident())
            try:
                job()
            finally:
                with self._lock:
                    self._rest()

        with ThreadPoolExecutor(len(jobs)) as pool:
            list(pool.map(one, jobs))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    made = Clock()
    with monkeypatch.context() as patch:
        patch.setattr("bigbatch.awake._CLOCK", made)
        patch.setattr(time, "sleep", made.sleep)
        yield made


class CountingStore(HashStore):
    """Counts requests; has no time limits; is_gone: its holder has left."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests, self.is_gone = 0, False
        self.ended: frozenset[int] = frozenset()
        """Ranks whose processes have."""
        self._lock = Lock()

    def within(self, seconds: float) -> "CountingStore":
        return self

    def _count(self) -> None:
        with self._lock:
            self.num_requests += 1
        if self.is_gone:
            raise RuntimeError("connection closed")

    can_wait = False

    def tail(self, key: str, begin: int, *, num_gone: int, seconds: float) -> News:
        self._count()
        return News(bytes(super().get(key))[begin:] if super().check([key]) else b"", self.ended)

    def append(self, key: str, value: str) -> None:
        self._count()
        super().append(key, value)


@dataclass
class Party:
    """A rank as its failure detector knows it."""

    rank: int
    world_size: int
    store: CountingStore
    holder: str = "rank 0"
    library: str = "control"
    timeout_seconds: float = 60.0

    def host_of(self, rank: int) -> str:
        return f"node{rank}"


def job_of(world_size: int) -> tuple[CountingStore, list[FailureDetector]]:
    store = CountingStore()
    return store, [FailureDetector(Party(rank, world_size, store)) for rank in range(world_size)]  # type: ignore[arg-type]


def reasons(ranks: Iterable[FailureDetector]) -> list[str]:
    """The verdict's text on each rank; "" before it is known."""
    return [rank.verdict.reason if rank.verdict else "" for rank in ranks]


def fails_in_the_sum(rank: FailureDetector, clock: Clock, *, after: float, cause: str = LOST) -> None:
    """Fail like a rank whose main thread waits in the sum."""
    clock.sleep(after)
    rank.roll_call(cause)
    rank.stop_requests()


def looks_on(rank: FailureDetector, clock: Clock, *, after: float, is_waiting: bool = False) -> None:
    """Look like a rank's watch, once a second; its main thread comes to the next sum in half a minute."""
    clock.sleep(after)
    while not rank.verdict and clock.now < 20:
        rank.log.look(is_waiting=lambda: is_waiting, is_watching=True)
        clock.sleep(1.0)
    clock.sleep(30.0 - clock.now)
    fails_in_the_sum(rank, clock, after=0.0)


def holds_the_store(rank: FailureDetector, clock: Clock, store: CountingStore, *, cause: str = LATE) -> None:
    """It is the first to fail, and takes the store with it."""
    fails_in_the_sum(rank, clock, after=0.0, cause=cause)
    store.is_gone = True


@pytest.mark.parametrize("n", [128, pytest.param(1024, marks=[pytest.mark.long, pytest.mark.weekly])])
def test_many_ranks_have_one_right_verdict_for_a_few_requests_of_each(n: int, clock: Clock) -> None:
    lost = n // 3 * 2  # even: it is none of those that fail in the sum
    store, ranks = job_of(n)
    jobs = [partial(holds_the_store, ranks[0], clock, store)]
    for number, rank in enumerate(ranks[1:], start=1):
        if number % 2:
            jobs.append(partial(fails_in_the_sum, rank, clock, after=number % 10 / 10))
        elif number != lost:
            jobs.append(partial(looks_on, rank, clock, after=number % 10 / 10, is_waiting=True))
    clock.run(jobs)
    assert {*reasons(rank for rank in ranks if rank is not ranks[lost])} == {
        f"no answer from rank {lost} on node{lost}"
    }
    assert {rank.verdict and rank.verdict.lost for rank in ranks if rank is not ranks[lost]} == {frozenset({lost})}
    # the counting one, which holds the store as well: while the others answer, and while they hear
    of_one = 5 * (limits.ROLL_CALL_SECONDS + 2 * limits.LINGER_SECONDS) / limits.COUNT_PAUSE_SECONDS
    assert store.num_requests <= 24 * n + of_one


def test_rank_that_fails_by_itself_is_missed_though_its_sum_fails_as_well(clock: Clock) -> None:
    """Its queue's thread meets the end of the others' connections."""
    _, ranks = job_of(3)

    def fails_by_itself() -> None:
        ranks[1].publish_crash()
        clock.sleep(0.5)
        ranks[1].roll_call(LOST)

    waiting = [partial(fails_in_the_sum, ranks[number], clock, after=0.7) for number in (0, 2)]
    clock.run([fails_by_itself, *waiting])
    assert {reasons(ranks)[number] for number in (0, 2)} == {"no answer from rank 1 on node1"}


def test_ranks_that_lost_another_one_are_not_told_what_comes_of_it(clock: Clock) -> None:
    _, ranks = job_of(3)

    def fails_afterwards() -> None:
        clock.sleep(0.5)
        ranks[1].publish_crash(1)

    clock.run([fails_afterwards, partial(fails_in_the_sum, ranks[0], clock, after=0.1)])
    assert ranks[0].log.state.exit_code is None


def test_holder_that_fails_by_itself_stays_until_the_others_have_the_verdict(clock: Clock) -> None:
    store, ranks = job_of(4)

    def fails_by_itself() -> None:
        ranks[0].publish_crash()
        store.is_gone = True

    waiting = [partial(fails_in_the_sum, rank, clock, after=0.9) for rank in ranks[1:]]
    clock.run([fails_by_itself, *waiting])
    assert {*reasons(ranks[1:])} == {"no answer from rank 0 on node0"}


def test_holder_leaves_once_all_have_heard_or_after_its_time_limit(clock: Clock) -> None:
    _, ranks = job_of(2)
    ended: list[float] = []

    def holder() -> None:
        ranks[0].publish_crash()
        ended.append(clock.now)

    clock.run([holder, ranks[1].publish_crash])
    assert ended == [pytest.approx(0.0, abs=2 * limits.COUNT_PAUSE_SECONDS)]
    clock.now, (_, ranks) = 0.0, job_of(2)
    clock.run([holder])
    limit = limits.ROLL_CALL_SECONDS + limits.LINGER_SECONDS
    assert ended[1] == pytest.approx(limit, abs=2 * limits.COUNT_PAUSE_SECONDS)


@pytest.mark.parametrize("goes_on", [False, True])
def test_store_that_lives_on_is_not_held_up_for_missing_ranks(goes_on: bool, clock: Clock) -> None:
    _, ranks = job_of(2)
    ranks[0].heals = goes_on
    taken = []

    def holder() -> None:
        ranks[0].roll_call(LATE)
        before = clock.now
        ranks[0].stop_requests()
        taken.append(clock.now - before)

    clock.run([holder])
    assert taken[0] == pytest.approx(0 if goes_on else limits.LINGER_SECONDS, abs=limits.COUNT_PAUSE_SECONDS)


def test_rank_waits_for_others_while_any_of_its_threads_does() -> None:
    _, (rank, _) = job_of(2)
    with rank.waiting(), ThreadPoolExecutor(1) as pool:

        def wait_beside() -> None:
            with rank.waiting():
                pass

        pool.submit(wait_beside).result()
        assert rank.is_waiting
    assert not rank.is_waiting


def test_verdict_after_the_store_is_gone_misses_its_holder() -> None:
    store, ranks = job_of(2)
    store.is_gone = True
    assert ranks[1].roll_call(LOST).reason == "no answer from the job's key-value store, which runs beside rank 0"
    assert ranks[1].verdict is not None
    assert ranks[1].verdict.lost == {0}
    asked = store.num_requests
    ranks[1].stop_requests()
    ranks[1].publish_crash()
    assert store.num_requests == asked, "a store that does not answer is not asked again"


def test_answer_that_the_store_did_not_take_is_given_again() -> None:
    store, ranks = job_of(2)
    store.append(LOG, '["failed", 0, "lost"]\n')
    taken, store.append = store.append, lambda *_: 1 / 0  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError):
        ranks[1].log.look()
    store.append = taken  # type: ignore[method-assign]
    for _ in range(3):
        ranks[1].log.look()
    assert store.get(LOG).splitlines()[1:] == [b'["alive", 1]']


def test_ranks_that_have_ended_well_are_not_named_and_the_holder_stays_for_those_that_cannot(clock: Clock) -> None:
    """Ranks 0 and 1 have passed the last barrier; rank 2 waits in it for rank 3, which no longer responds."""
    store, ranks = job_of(4)
    ended: dict[int, float] = {}

    def ends(number: int) -> None:
        ranks[number].publish_success(within_seconds=60)
        ended[number] = clock.now
        store.is_gone = number == 0

    clock.run([partial(ends, 0), partial(ends, 1), partial(fails_in_the_sum, ranks[2], clock, after=20.0, cause=LATE)])
    assert reasons(ranks)[2] == "no answer from rank 3 on node3"
    assert ended[1] == 0.0
    assert 20.0 <= ended[0] < 30.0


@pytest.mark.parametrize("failure", ["none", "own", "gone"])
def test_holder_ends_well_with_the_last_rank_or_in_the_end_without_it(failure: str, clock: Clock) -> None:
    _, ranks = job_of(3)
    ended: list[float] = []

    def holder() -> None:
        ranks[0].publish_success(within_seconds=60)
        ended.append(clock.now)

    def last() -> None:
        clock.sleep(5.0)
        if failure == "none":
            ranks[2].publish_success(within_seconds=60)
        if failure == "own":
            ranks[2].publish_crash()

    clock.run([holder, partial(ranks[1].publish_success, within_seconds=60), last])
    (seconds,) = ended
    linger = limits.ROLL_CALL_SECONDS + 2 * limits.LINGER_SECONDS
    expected = {"none": 5.0, "own": 5.0 + linger, "gone": 60.0}[failure]
    assert seconds == pytest.approx(expected, abs=3 * limits.COUNT_PAUSE_SECONDS)
