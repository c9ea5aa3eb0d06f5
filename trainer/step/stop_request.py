"""Requests to stop a run, and requests of ranks to join it: all ranks act on one after the same step."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import Thread
from types import FrameType

from bigbatch.comm.rendezvous.control import Control
from bigbatch.comm.rendezvous.departure import Departure
from bigbatch.comm.rendezvous.environ import ProcessEnv
from bigbatch.comm.rendezvous.limits import MAX_LOOKS_PER_SECOND
from bigbatch.errors import INTERRUPTED
from bigbatch.parts import load
from bigbatch.trainer.step.signals import STOP_SIGNALS, handled_signals

LOOK_SECONDS = 1.0
"""Seconds between two checks whether another rank was asked to stop."""
AGREE_SECONDS = 0.05
"""Seconds between two checks whether all ranks will stop."""


def leave_stopped(env: ProcessEnv) -> int:
    """Return the exit code of a rank that stopped as requested: 130, or 0 if its launcher reads that from a file.

    Only a file that is there already counts: a host that does not see it leaves by its code.
    """
    load("bigbatch.comm.rendezvous.exit_record.record_end")(env, INTERRUPTED)
    with suppress(OSError):
        if env.stopped_file is not None and env.stopped_file.exists():
            return 0
    return INTERRUPTED


def _is_true(look: Callable[[], object]) -> bool:
    """Return whether look() returns a true value; False if it fails: that must not end the thread that listens."""
    with suppress(RuntimeError, OSError):
        return bool(look())
    return False


@cache
def _leave_children_out() -> None:
    """Keep forked children, which inherit the handlers, from reporting their signals to this process."""
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


class Stopped(Exception):
    """Raised on all ranks to end the work between two boundaries after a request to stop."""


class Joining(Exception):
    """Raised on all ranks to end the run of their group, and take in ranks that want to join.

    since: awake_seconds() when this rank reached the boundary.
    """

    def __init__(self, *, since: float) -> None:
        super().__init__()
        self.since = since


class StopRequest:
    """Remembers the first stop signal, and lets all ranks act on it together; a second Ctrl-C interrupts at once.

    Construct it in the main thread. launcher: process id of a parent whose end counts as a stop signal: otherwise ranks
    would train on unnoticed. takes_signals: False for work that a first Ctrl-C may interrupt.
    """

    def __init__(self, *, launcher: int | None = None, takes_signals: bool = True) -> None:
        self._launcher = launcher
        self.signal_name: str | None = None
        """The first stop signal of this rank, or another source of a request to stop."""
        self._is_asked = False
        self._departure: Departure | None = None
        for number in handled_signals() if takes_signals else ():
            signal.signal(number, self._note)
        _leave_children_out()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._is_asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._is_asked = True
        self.signal_name = self.signal_name or signal.Signals(number).name

    def ask(self, asked_by: str) -> None:
        """Request a stop, as a signal does. asked_by: name of the source."""
        self.signal_name = self.signal_name or asked_by

    @property
    def is_set(self) -> bool:
        return self.signal_name is not None

    @property
    def asked_by(self) -> str:
        return self.signal_name or "another rank's signal"

    @contextmanager
    def watch(
        self, control: Control, *, acknowledge: Callable[[str], None], wants_join: Callable[[], object] | None = None
    ) -> Iterator[None]:
        """Agree with the other ranks, within the block, on the step at which to stop; pass acknowledge the source then.

        wants_join: returns a true value if other ranks want to join; called every LOOK_SECONDS. None: no rank can.
        Collective, and in the main thread only. A second thread listens, because signals must arrive while the main
        thread waits for a device or for other ranks.
        """
        self._departure = Departure(control)
        heard, rings = socket.socketpair()
        rings.setblocking(False)
        previous = signal.set_wakeup_fd(rings.fileno(), warn_on_full_buffer=False)
        # in each check every rank sends up to three requests
        soon_seconds = max(AGREE_SECONDS, 3 * control.world_size / MAX_LOOKS_PER_SECOND)
        what = (heard, self._departure, acknowledge, wants_join, soon_seconds)
        listener = Thread(target=self._listen, args=what, name="bigbatch-stop", daemon=True)
        listener.start()
        try:
            yield
        finally:
            self._departure = None  # a job's next group has another one
            signal.set_wakeup_fd(previous)
            rings.shutdown(socket.SHUT_WR)  # this ends the listener, even if a forked process holds a copy
            rings.close()
            listener.join(timeout=LOOK_SECONDS)  # it may be in a request that the store does not answer any more
            heard.close()  # here: it takes signals as long as they are written, whether or not the listener lives

    def _listen(
        self,
        heard: socket.socket,
        departure: Departure,
        acknowledge: Callable[[str], None],
        wants_join: Callable[[], object] | None,
        soon_seconds: float,
    ) -> None:
        has_said = has_asked = False
        # without its store the job is about to fail, and says so; OSError: watch() has ended, or stdout is closed
        with suppress(RuntimeError, OSError):
            while True:
                if self._launcher not in (None, os.getppid()):
                    self.ask("the end of its launcher")
                if self.signal_name and not has_asked:
                    has_asked = True
                    departure.ask()
                if wants_join and not departure.is_near and _is_true(wants_join):
                    departure.ask(joins=True)
                has_told = departure.poll()
                if has_told and not has_said and departure.is_agreed():
                    has_said = True
                    acknowledge(self.asked_by)
                is_soon = (has_told or departure.is_near) and not has_said
                heard.settimeout(soon_seconds if is_soon else LOOK_SECONDS)
                try:
                    numbers = heard.recv(64)
                except TimeoutError:
                    continue
                if not numbers:
                    if departure.is_known and not (departure.is_join or has_said):  # the main thread was faster
                        acknowledge(self.asked_by)
                    return
                names = [signal.Signals(number).name for number in numbers if number in STOP_SIGNALS]
                self.signal_name = self.signal_name or next(iter(names), None)

    def is_due(self) -> bool:
        """Pass a boundary of all ranks, within watch(); return whether all stop, or let others join. No device sync."""
        return self._departure is not None and self._departure.is_due()

    @property
    def joining(self) -> Joining | None:
        """Return the exception to raise if all ranks let others join at the last boundary; else None."""
        departure = self._departure
        return Joining(since=departure.since) if departure and departure.is_join and departure.has_come else None

    def leave_if_due(self) -> None:
        """Pass a boundary. Raises: Stopped if all ranks stop at it; Joining if they let others join."""
        if self.is_due():
            raise self.joining or Stopped
