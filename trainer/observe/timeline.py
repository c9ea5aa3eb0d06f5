"""Record the operations of comm.timeline_steps on all ranks, as a trace for a browser."""

from pathlib import Path

from bigbatch.comm.timeline import Timeline
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.observe.observer import Observed, Observer


class TimelineRecorder(Observer):
    """Starts the trace at the first of comm.timeline_steps, and writes it after the last or at the run's end."""

    def __init__(self, observed: Observed) -> None:
        self._observed, self._rundir = observed, RunDir(Path(observed.config.run.directory))
        steps = observed.config.comm.timeline_steps
        assert steps is not None
        self._first, self._last = steps

    def before_step(self, step: int) -> None:
        transport = self._observed.communicator.transport
        if not self._first <= step <= self._last:
            self.end()
        elif transport.timeline is None:
            transport.timeline = Timeline(transport.device)

    def end(self) -> None:
        """Write the trace, if one is being recorded. Collective."""
        communicator = self._observed.communicator
        timeline = communicator.transport.timeline
        if timeline is None:
            return
        self._observed.parts.precision.wait_for_weights()  # operations are recorded when they end
        communicator.transport.timeline = None
        trace = timeline.gather(communicator.connection.control)
        if communicator.rank == 0:
            self._rundir.write_text(self._rundir.timeline, trace)
            self._observed.say(f"timeline: open {self._rundir.timeline} in https://ui.perfetto.dev")
