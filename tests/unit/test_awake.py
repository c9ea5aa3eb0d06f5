"""The clock that stands still while its process is stopped."""

from threading import Event

import pytest

from bigbatch import awake


class Time:
    """Plays the system's clock; a clock that reads it has no thread that ticks, as each test ticks itself."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(awake, "monotonic", lambda: self.now)
        monkeypatch.setattr(awake.AwakeClock, "_tick", lambda clock: None)
        self.clock = awake.AwakeClock()
        monkeypatch.setattr(awake, "_CLOCK", self.clock)

    def passes(self, seconds: float) -> float:
        """Return by how much the clock continues in so many seconds without a tick."""
        before = awake.awake_seconds()
        self.now += seconds
        return awake.awake_seconds() - before


def test_clock_counts_pauses_of_a_busy_machine_and_no_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time(monkeypatch)
    assert time.passes(0.5) == 0.5
    assert time.passes(9.5) == 9.5
    assert time.passes(3600) == awake.TICK_SECONDS
    assert time.passes(2) == 2


def test_wait_goes_on_where_a_stop_took_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    time, waits = Time(monkeypatch), []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        time.now += 3600 if len(waits) == 1 else seconds
        return False

    assert not awake.wait_awake(wait, 5)
    assert waits == [5, 4]


def test_clock_ticks_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a long pause between two questions would pass for a stop."""
    monkeypatch.setattr(awake, "TICK_SECONDS", 0.01)
    has_ticked, clock = Event(), awake.AwakeClock()
    clock.seconds()
    monkeypatch.setattr(clock, "seconds", has_ticked.set)
    assert has_ticked.wait(10)
