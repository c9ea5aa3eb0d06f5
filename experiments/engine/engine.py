"""The engine: starts points on this machine or from it, resumes and judges them, several at once if asked for."""

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from types import FrameType
from typing import Any, Protocol

from bigbatch.errors import RunFolderError
from bigbatch.experiments.engine.folder import (
    DONE,
    FAILED,
    MISSING,
    PRUNED,
    SweepFolder,
    change_state,
    read_summary,
    state_of,
    write_config,
)
from bigbatch.experiments.engine.jobs import point_command
from bigbatch.experiments.engine.plan import Plan
from bigbatch.experiments.engine.points import Point
from bigbatch.files import make_folder, refuse_link
from bigbatch.trainer.run.child import ChildProcess
from bigbatch.trainer.run.folder import read_records, writing
from bigbatch.trainer.run.owner import require_free
from bigbatch.trainer.step.signals import handling_stops

POLL_SECONDS = 0.1
DISK_IS_FULL = ("No space left on device", "Disk quota exceeded")
"""The system's messages: a point that ends so has not failed, and the next one would end the same way."""


class Interrupted(Exception):
    """A signal stopped the points; those that ran are missing again, and resume from their checkpoints."""


class Producer(Protocol):
    """Makes points one by one, and is told how each ended."""

    def next_point(self) -> Point | None:
        """Return another point; None if there is none left."""
        ...

    watches: bool
    """True if why_stop needs evaluations; then the records of running points are read."""

    def why_stop(self, point: Point, evaluation: dict[str, Any]) -> str:
        """Return why a point that was just evaluated is stopped early; empty to let it go on."""
        ...

    def end(self, point: Point, state: dict[str, Any]) -> None:
        """Take the state in which a point has ended."""
        ...


class Listed:
    """Produces the points of a list."""

    watches = False

    def __init__(self, points: Sequence[Point], on_end: Callable[[Point, dict[str, Any]], None]) -> None:
        self._points, self.end = iter(points), on_end

    def next_point(self) -> Point | None:
        """Return the next point."""
        return next(self._points, None)

    def why_stop(self, point: Point, evaluation: dict[str, Any]) -> str:
        """Stop none."""
        return ""


@dataclass
class _Running:
    point: Point
    process: ChildProcess
    why: str = ""
    """Why it was asked to stop; empty if the user stopped it."""
    state: str = FAILED
    """State of a point that was stopped for this reason."""
    last_epoch: float = 0.0
    read_bytes: int = 0


def run_points(
    plan: Plan, producer: Producer, folder: SweepFolder, *, parallel: int = 1, gpus: Sequence[str] = ()
) -> None:
    """Run all points, so many at once, and go on if one fails; gpus: to share out; empty: each point sees all.

    Raises: Interrupted; RunFolderError, also if the disk is full.
    """
    stops: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        stops.append(number)

    with handling_stops(note):
        _Engine(plan, producer, folder, stops, gpus).run(parallel)
    if stops:
        raise Interrupted


class _Engine:
    def __init__(
        self, plan: Plan, producer: Producer, folder: SweepFolder, stops: Sequence[int], gpus: Sequence[str]
    ) -> None:
        self._plan, self._producer, self._folder = plan, producer, folder
        self._stops, self._gpus = stops, gpus
        self._running: dict[int, _Running] = {}
        self._heard = 0

    def run(self, parallel: int) -> None:
        """Run points until none is left or a signal comes. Raises: RunFolderError."""
        try:
            while True:
                for slot in range(parallel):
                    if slot not in self._running and not self._stops and (point := self._producer.next_point()):
                        self._running[slot] = self._start(point, slot)
                if not self._running:
                    return
                self._pass_on()
                for slot, each in list(self._running.items()):
                    self._follow(slot, each)
                if self._running:
                    time.sleep(POLL_SECONDS)
        finally:
            for each in self._running.values():
                each.process.end()

    def _start(self, point: Point, slot: int) -> _Running:
        folder, number = self._folder, point.number
        if self._plan.steps is None and state_of(folder, number) == MISSING:
            require_nobody(folder, number)
        else:
            start_over(folder, number)
        write_config(folder, point)
        argv = [*self._seen(point, slot), *point_command(self._plan, point, folder)]
        change_state(folder, number, state=MISSING, reason=None, exit_code=None, command=argv)
        return _Running(point, ChildProcess(argv, log=folder.log(number), within=folder.path))

    def _seen(self, point: Point, slot: int) -> list[str]:
        """Return words that give a point's ranks their GPUs, taken in turn; none if they need all of them."""
        if point.ranks >= len(self._gpus):
            return []
        mine = [self._gpus[(slot * point.ranks + rank) % len(self._gpus)] for rank in range(point.ranks)]
        return ["env", f"CUDA_VISIBLE_DEVICES={','.join(mine)}"]

    def _pass_on(self) -> None:
        """Ask all points to stop at the first signal; a second one presses them."""
        if len(self._stops) > self._heard:
            self._heard = len(self._stops)
            for each in self._running.values():
                if self._heard > 1 or not each.process.was_asked:
                    each.process.ask_to_stop()

    def _follow(self, slot: int, running: _Running) -> None:
        limit = self._plan.timeout_minutes
        code = running.process.exit_code()  # before its files are read: after an exit they are complete
        if code is not None:
            del self._running[slot]
            self._conclude(running, code)
            return
        if limit is not None and running.process.seconds > 60 * limit and not running.process.was_asked:
            running.why = f"took longer than {limit:g} min, and was ended"
            running.process.ask_to_stop()
        for evaluation in self._new_evaluations(running) if self._producer.watches else ():
            why = self._producer.why_stop(running.point, evaluation)
            if why and not running.process.was_asked:
                running.why, running.state = why, PRUNED
                running.process.ask_to_stop()

    def _new_evaluations(self, running: _Running) -> list[dict[str, Any]]:
        """Return the evaluations that no earlier call returned; reads the file if it has grown."""
        path = self._folder.run(running.point.number).metrics
        num_bytes = path.stat().st_size if path.exists() else 0
        if num_bytes == running.read_bytes:
            return []
        running.read_bytes = num_bytes
        evaluations = [record for record in read_records(path) if record["kind"] == "eval"]
        new = [record for record in evaluations if record["epoch"] > running.last_epoch]
        if new:
            running.last_epoch = new[-1]["epoch"]
        return new

    def _conclude(self, running: _Running, code: int) -> None:
        number, seconds = running.point.number, running.process.seconds
        outcome = judge(self._folder, number, exit_code=code, reason=running.process.reason)
        if outcome["state"] != DONE and running.why:
            outcome = {"state": running.state, "reason": running.why}
        elif outcome["state"] != DONE and self._stops:
            return  # missing: it runs again with the sweep
        elif any(words in str(outcome["reason"]) for words in DISK_IS_FULL):
            raise RunFolderError(
                f"point {number} of {self._folder.path} ended: {outcome['reason']}; make room, and the same command "
                "goes on from there"
            )
        state = change_state(self._folder, number, exit_code=code, seconds=seconds, **outcome)
        self._producer.end(running.point, state)


def start_over(folder: SweepFolder, number: int) -> None:
    """Remove the results of an earlier try, which would count as measured. Raises: RunFolderError."""
    require_nobody(folder, number)
    path = folder.run(number).path
    with writing(path):
        if path.exists():
            rmtree(path)
        with suppress(FileNotFoundError):
            folder.log(number).unlink()


def require_nobody(folder: SweepFolder, number: int) -> None:
    """Check that no earlier try still trains, as after its sweep was killed: it would slow the next one.

    Raises: RunFolderError.
    """
    path = folder.run(number).path
    with writing(path):
        make_folder(path.parent, within=folder.path)
        refuse_link(path)
        if path.exists():
            require_free(path)


def judge(folder: SweepFolder, number: int, *, exit_code: int | None, reason: Callable[[], str]) -> dict[str, Any]:
    """Return the state and reason of a point after its job has ended."""
    if read_summary(folder, number) is not None and exit_code in (0, None):
        return {"state": DONE, "reason": None}
    return {"state": FAILED, "reason": reason()}


def run_command(argv: Sequence[str], *, log: Path, within: Path, seconds: float | None) -> int:
    """Run a command that is not a point, and return its exit code. Raises: Interrupted; RunFolderError."""
    stops: list[int] = []
    with handling_stops(lambda number, frame: stops.append(number)):
        process = ChildProcess(argv, log=log, within=within)
        try:
            while (code := process.exit_code()) is None:
                if (stops or (seconds is not None and process.seconds > seconds)) and not process.was_asked:
                    process.ask_to_stop()
                time.sleep(POLL_SECONDS)
        finally:
            process.end()
    if stops:
        raise Interrupted
    return code
