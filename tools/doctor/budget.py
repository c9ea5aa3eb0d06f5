"""Time budget of an examination; first measurements tell which parts fit."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

RESERVE_SECONDS = 5.0
"""Seconds reserved for the start before the clock runs, for the ends of processes and for the report."""
MIN_SECONDS = 1.0
"""Least seconds for any part that has started."""
STEPS_IN_BUDGET = 120
"""A step that takes more than a budget divided by this number is measured in part."""
BASE_SHARE = 1 / 3
"""Most of the remaining time that the unchanged config may take in as many turns as its speedups; else it gets one."""
WARM_STEPS = 3
"""Steps of each process before any is timed."""
PROFILE_STEPS = 4
"""Steps to profile phases, operators and syncs."""
START_MARGIN = 1.25
"""Later starts are assumed to take this many times the first one, which ran alone."""
EXTRA_SECONDS: Mapping[str, float] = {"compile": 60.0, "graph": 5.0}
"""Assumed seconds of a speedup before its first step, for a ResNet."""


@dataclass(frozen=True)
class Budget:
    """Returns the seconds that are used and left of a limit; infinite without one."""

    seconds: float = math.inf
    clock: Callable[[], float] = time.monotonic
    started: float = field(default_factory=time.monotonic)

    @property
    def is_limited(self) -> bool:
        return self.seconds < math.inf

    def used(self) -> float:
        return self.clock() - self.started

    def left(self) -> float:
        """Return the seconds left for measurements, without those of the report."""
        return self.seconds - RESERVE_SECONDS - self.used()

    def limit(self, seconds: float, *, least: float = MIN_SECONDS) -> float:
        """Return that many seconds, or the rest of the budget if it is less, but not below `least`."""
        return min(seconds, max(least, self.left()))


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Predicts, from one start and one step, the seconds that each part of an examination takes."""

    start_seconds: float
    step_seconds: float
    turn_seconds: float
    turns: int
    ahead: int
    """Steps for which images were fetched while another process had its turn."""
    flushes: bool = True
    """Whether turns of speedups use these up first; those of the unchanged config always do."""

    @property
    def turn(self) -> float:
        """Return the seconds of one turn: a step at least."""
        ahead = self.ahead if self.flushes else 0
        return ahead * self.step_seconds + max(self.step_seconds, self.turn_seconds)

    @property
    def warm(self) -> float:
        """Return the seconds until the first turn of a process that has started."""
        return WARM_STEPS * self.step_seconds

    @property
    def comparison(self) -> float:
        """Return the seconds of a comparison of two warm processes."""
        return 2 * self.turns * self.turn

    def trial(self, name: str) -> float:
        """Return the seconds to start and compare a speedup of that name."""
        return START_MARGIN * self.start_seconds + EXTRA_SECONDS.get(name, 0.0) + self.warm + self.comparison

    def fits(self, name: str, budget: Budget, *, others: int = 0) -> bool:
        """Return whether a speedup fits after that many others and before the final comparison."""
        return others * self.trial("") + self.trial(name) + self.comparison <= budget.left()

    def base_turns(self, budget: Budget) -> int:
        """Return the number of turns of the unchanged config: as many as its speedups get, or one."""
        once = 2 * self.warm + PROFILE_STEPS * self.step_seconds
        return self.turns if once + self.comparison <= BASE_SHARE * budget.left() else 1
