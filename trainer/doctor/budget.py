"""How long an examination may take, and what of it fits into the rest: measured first, then planned."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

RESERVE_SECONDS = 5.0
"""Kept for what came before the clock, for the ends of processes and for the report."""
LEAST_SECONDS = 1.0
"""That anything which has begun is given."""
STEPS_IN_BUDGET = 120
"""A step that takes longer than this part of a budget is measured in part."""
LOOK_SHARE = 1 / 3
"""Share of the remaining time for the unchanged config, which may be measured in as many turns as its speedups."""
WARM_STEPS = 3
"""Steps of each process before any is timed."""
PROFILE_STEPS = 4
"""Phases, operators and syncs, each by a step or more."""
START_MARGIN = 1.25
"""Times the first start, which read no other files and met no other process."""
EXTRA_SECONDS: Mapping[str, float] = {"compile": 60.0, "graph": 5.0}
"""What a speedup takes before its first step: assumed, of a ResNet."""


@dataclass(frozen=True)
class Budget:
    """Tells what is left of so many seconds; infinite where nobody limits them."""

    seconds: float = math.inf
    clock: Callable[[], float] = time.monotonic
    started: float = field(default_factory=time.monotonic)

    @property
    def is_limited(self) -> bool:
        """Tell whether somebody waits for the end."""
        return self.seconds < math.inf

    def used(self) -> float:
        """Return the seconds since the start."""
        return self.clock() - self.started

    def left(self) -> float:
        """Return the seconds that may still be measured in: the report has its own."""
        return self.seconds - RESERVE_SECONDS - self.used()

    def limit(self, seconds: float) -> float:
        """Return so many seconds, or what is left where that is less."""
        return min(seconds, max(LEAST_SECONDS, self.left()))


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
    """Speedups' turns use those up first; the config's own always do."""

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
        """Return the seconds in which two that are warm are compared."""
        return 2 * self.turns * self.turn

    def trial(self, name: str) -> float:
        """Return the seconds in which a speedup of that name is started and compared."""
        return START_MARGIN * self.start_seconds + EXTRA_SECONDS.get(name, 0.0) + self.warm + self.comparison

    def fits(self, name: str, budget: Budget, *, others: int = 0) -> bool:
        """Tell whether a speedup fits, after so many others, and before the comparison of all that was taken."""
        return others * self.trial("") + self.trial(name) + self.comparison <= budget.left()

    def look_turns(self, budget: Budget) -> int:
        """Return how often the config as it is may be measured: as often as its speedups, or once."""
        once = 2 * self.warm + PROFILE_STEPS * self.step_seconds
        return self.turns if once + self.comparison <= LOOK_SHARE * budget.left() else 1


def images_in_a_step(budget: Budget, *, seconds_per_image: float) -> float:
    """Return how many images of a rank a step may have, so that an examination's many steps fit."""
    return budget.seconds / STEPS_IN_BUDGET / seconds_per_image
