"""Recording what the ranks sent in some steps, as a trace for Perfetto."""

from collections.abc import Callable

from bigbatch.comm.communicator import Communicator
from bigbatch.trainer.run.folder import RunDir


class TimelineRecorder:
    """Records the steps from first to last; after them the first rank writes all ranks' operations to a file.

    steps: (first, last), or None for nothing. settle: waits for what is still on its way. say: for the user.
    """

    def __init__(
        self,
        communicator: Communicator,
        rundir: RunDir,
        *,
        steps: tuple[int, int] | None,
        settle: Callable[[], object],
        say: Callable[[str], None],
    ) -> None:
        self._communicator, self._rundir, self._steps = communicator, rundir, steps
        self._settle, self._say = settle, say

    def before_step(self, step: int) -> None:
        """Begin or end recording where it is due; sys.maxsize after all steps. Collective."""
        if self._steps is None:
            return
        first, last = self._steps
        timeline = self._communicator.timeline
        was_active, is_active = timeline.is_active, first <= step <= last
        if was_active and not is_active:
            self._settle()  # what is still on its way is recorded as it ends
        timeline.is_active = is_active
        if was_active and not is_active:
            trace = self._communicator.gather_trace()
            if self._communicator.rank == 0:
                self._rundir.write_text(self._rundir.timeline, trace)
                self._say(f"timeline: open {self._rundir.timeline} in https://ui.perfetto.dev")
