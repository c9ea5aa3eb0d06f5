"""Whether a run can save and stop within the seconds between the request and the end of its job's time. Pure."""

import math


class NoticeWatch:
    """Remembers how long a stop may have to wait for each kind of work, and says once where that is too long.

    A stop waits for the step under way, or for an evaluation's batches up to its next exchange, and then for two
    checkpoints: the last one may still be being written. notice_seconds: how long before the end the ranks are asked.
    """

    def __init__(self, *, notice_seconds: int) -> None:
        self._notice_seconds = notice_seconds
        self._longest = {"step": 0.0, "evaluation": 0.0, "checkpoint": 0.0}
        self._has_said = False

    def see(self, kind: str, seconds: float) -> str | None:
        """Take in a step, the part of an evaluation, or a checkpoint; return a line for the user, or None."""
        self._longest[kind] = max(self._longest[kind], seconds)
        before = max(("step", "evaluation"), key=lambda each: self._longest[each])
        saving = 2 * self._longest["checkpoint"]
        needed = self._longest[before] + saving
        if self._has_said or needed <= self._notice_seconds:
            return None
        self._has_said = True
        what = {"step": "a step", "evaluation": "an evaluation's next exchange"}[before]
        return (
            f"the checkpoint at the time limit may be lost: to stop takes up to {needed:.0f} s here "
            f"({self._longest[before]:.0f} s until {what} is done, {saving:.0f} s to save), and "
            f"the job asks {self._notice_seconds} s before; submit it again with --stop-seconds "
            f"{60 * math.ceil(needed / 30)}"
        )
