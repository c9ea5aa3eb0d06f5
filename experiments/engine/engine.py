"""Run a sweep's points as child processes, several at once if asked: start or resume each, watch it, record its end."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any

from bigbatch.errors import RunFolderError
from bigbatch.experiments.engine.folder import DONE, FAILED, PENDING, PRUNED, SweepFolder
from bigbatch.experiments.engine.jobs import point_command
from bigbatch.experiments.engine.plan import SweepPlan
from bigbatch.experiments.engine.points import Point
from bigbatch.files import make_folder, refuse_link
from bigbatch.tools.child import ChildProcess
from bigbatch.trainer.folder.folder import read_records_from, writing
from bigbatch.trainer.folder.owner import require_free
from bigbatch.trainer.step.signals import handling_stops

POLL_SECONDS = 0.1
LEAVING = ".leaving-"
"""Beginning of the names that points have while they are removed."""
MAX_THREADS = 128
DISK_IS_FULL = ("No space left on device", "Disk quota exceeded")
"""Messages of a full disk. A point that they end has not failed: the next one would end the same way."""


class Interrupted(Exception):
    """A signal stopped the sweep. Unfinished points are pending again, and resume from their checkpoints."""


@dataclass
class _Running:
    point: Point
    process: ChildProcess
    why: str = ""
    """Why the engine asked it to stop; empty if it did not, also if the user stopped it."""
    state: str = FAILED
    """State of a point that was stopped for this reason."""
    last_epoch: float = 0.0
    read_bytes: int = 0
    """End of the last record that was read."""


def run_points(
    plan: SweepPlan,
    points: Iterable[Point],
    folder: SweepFolder,
    *,
    on_end: Callable[[Point, dict[str, Any]], None],
    why_stop: Callable[[Point, dict[str, Any]], str] | None = None,
    parallel: int = 1,
    gpus: Sequence[str] = (),
) -> None:
    """Run all points, up to parallel at once, and continue if one fails; each is drawn from points when a slot is free.

    on_end: gets each point that ended, with its state. why_stop: gets each new evaluation of a running point; returns
    why to stop that point early, or "". gpus: divided among the points; empty: each point sees all GPUs.
    Raises: Interrupted; RunFolderError, also if the disk is full.
    """
    engine = _Engine(plan, folder, on_end, why_stop, gpus)
    with handling_stops(lambda number, frame: engine.stops.append(number)):
        engine.run(iter(points), parallel)
    if engine.stops:
        raise Interrupted


@dataclass
class _Engine:
    plan: SweepPlan
    folder: SweepFolder
    on_end: Callable[[Point, dict[str, Any]], None]
    why_stop: Callable[[Point, dict[str, Any]], str] | None
    gpus: Sequence[str]
    stops: list[int] = field(default_factory=list)
    heard: int = 0
    """Number of stop signals that were passed on to the points."""

    def run(self, points: Iterator[Point], parallel: int) -> None:
        """Run points until none is left or a signal comes. Raises: RunFolderError."""
        running: dict[int, _Running] = {}
        try:
            while True:
                for slot in range(parallel):
                    if slot not in running and not self.stops and (point := next(points, None)):
                        running[slot] = self._start(point, slot)
                if not running:
                    return
                if len(self.stops) > self.heard:  # the first signal asks all points to stop, a second one repeats that
                    self.heard = len(self.stops)
                    for each in running.values():
                        if self.heard > 1 or not each.process.was_asked:
                            each.process.ask_to_stop()
                for slot, each in list(running.items()):
                    code = each.process.exit_code()  # before its files are read: after an exit they are complete
                    if code is None:
                        self._watch(each)
                    else:
                        del running[slot]
                        self._conclude(each, code)
                if running:
                    time.sleep(POLL_SECONDS)
        finally:
            for each in running.values():
                each.process.end()

    def _start(self, point: Point, slot: int) -> _Running:
        folder, number = self.folder, point.number
        require_idle(folder, [number])
        if self.plan.steps is not None or folder.state_of(number) != PENDING:
            start_over(folder, number)
        folder.write_config(point)
        argv = [*gpus_of_slot(self.gpus, ranks=point.ranks, slot=slot), *point_command(self.plan, point, folder)]
        folder.change_state(number, state=PENDING, reason=None, exit_code=None, command=argv)
        return _Running(point, ChildProcess(argv, log=folder.log(number), within=folder.path))

    def _watch(self, running: _Running) -> None:
        """Ask a running point to stop if it takes too long, or if why_stop gives a reason for a new evaluation."""
        limit, process = self.plan.timeout_minutes, running.process
        if limit is not None and process.seconds > 60 * limit and not process.was_asked:
            running.why = f"took longer than {limit:g} min, and was ended"
            process.ask_to_stop()
        if self.why_stop is None:
            return
        path = self.folder.run(running.point.number).metrics
        num_bytes = path.stat().st_size if path.exists() else 0
        if num_bytes == running.read_bytes:
            return
        # a file that a run has shortened, as it went back, is read again
        for end, record in read_records_from(path, start=running.read_bytes if num_bytes > running.read_bytes else 0):
            running.read_bytes = end
            if record["kind"] == "eval" and record["epoch"] > running.last_epoch:
                running.last_epoch = record["epoch"]
                if (why := self.why_stop(running.point, record)) and not process.was_asked:
                    running.why, running.state = why, PRUNED
                    process.ask_to_stop()

    def _conclude(self, running: _Running, code: int) -> None:
        number, seconds = running.point.number, running.process.seconds
        outcome = end_state(self.folder, number, exit_code=code, reason=running.process.reason)
        if outcome["state"] != DONE and running.why:
            outcome = {"state": running.state, "reason": running.why}
        elif outcome["state"] != DONE and self.stops:
            return  # pending: it runs again with the sweep
        elif any(words in str(outcome["reason"]) for words in DISK_IS_FULL):
            raise RunFolderError(
                f"point {number} of {self.folder.path} ended: {outcome['reason']}; free disk space, and repeat the "
                "command, which continues"
            )
        self.on_end(running.point, self.folder.change_state(number, exit_code=code, seconds=seconds, **outcome))


def gpus_of_slot(gpus: Sequence[str], *, ranks: int, slot: int) -> list[str]:
    """Return an env command that sets CUDA_VISIBLE_DEVICES by the point's slot; empty if it needs all GPUs."""
    if ranks >= len(gpus):
        return []
    mine = [gpus[(slot * ranks + rank) % len(gpus)] for rank in range(ranks)]
    return ["env", f"CUDA_VISIBLE_DEVICES={','.join(mine)}"]


def start_over(folder: SweepFolder, number: int) -> None:
    """Remove what an idle point's earlier try left, which would count as this try's. Raises: RunFolderError."""
    point = folder.point(number)
    with writing(point):
        for path in (folder.run(number).path, folder.log(number), *point.glob("evaluate*")):
            if path.is_dir():
                rmtree(path)
            else:
                path.unlink(missing_ok=True)


def remove_points(folder: SweepFolder, numbers: Sequence[int]) -> None:
    """Remove points that are no part of the sweep any more, with their runs. Raises: RunFolderError."""
    require_idle(folder, numbers)
    for number in numbers:
        with writing(folder.point(number)):
            # half of a point would be taken for a finished one: first it leaves its place
            folder.point(number).rename(folder.path / f"{LEAVING}{number}-{os.getpid()}")
    with writing(folder.path):
        for path in folder.path.glob(f"{LEAVING}*"):  # also those of a command that was interrupted
            rmtree(path)


def require_idle(folder: SweepFolder, numbers: Iterable[int]) -> None:
    """Check that no earlier try of these points still trains, such as of a killed sweep: it would slow the next one.

    All at once, since each may take half a minute. Raises: RunFolderError.
    """
    runs = [folder.run(number).path for number in numbers]
    with writing(folder.path), ThreadPoolExecutor(MAX_THREADS) as pool:
        for path in runs:
            make_folder(path.parent, within=folder.path)
            refuse_link(path)
        list(pool.map(require_free, [path for path in runs if path.exists()]))


def end_state(folder: SweepFolder, number: int, *, exit_code: int | None, reason: Callable[[], str]) -> dict[str, Any]:
    """Return the state and reason of a point after its job has ended."""
    if folder.read_summary(number) is not None and exit_code in (0, None):
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
