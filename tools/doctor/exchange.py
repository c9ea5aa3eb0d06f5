"""Start the process of a probe, and exchange orders and answers with it, as lines of JSON in two files.

Files, since all ranks of a probe read the same orders, and no launcher passes its standard input on to all ranks.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigbatch.errors import DoctorError
from bigbatch.files import open_to_append, read_plain, write_new
from bigbatch.interpreter import bigbatch_argv
from bigbatch.tools.child import ChildProcess
from bigbatch.trainer.config.file import dump_config
from bigbatch.trainer.config.schema import Config

IMAGES, TENSORS = "images", "tensors"
"""Kinds of batches that a probe times: images of the data set, or tensors that are generated once."""
CONFIG, ORDERS, ANSWERS = "config.yaml", "orders", "answers"
"""Files in the folder of a probe: the config that it measures, the doctor's orders, and its answers."""
POLL_SECONDS = 0.02
END_SECONDS = 10.0
"""Seconds for a probe to exit before it is ended: its ranks leave the job together."""
GPU_TAKEN = ("OutOfMemoryError", "busy or unavailable")
"""Words in a GPU error that another process causes."""


class ProbeChild:
    """Process of a probe of one config, from its start to close(); idle while another one measures."""

    def __init__(self, config: Config, folder: Path, *, num_ranks: int, start_seconds: float) -> None:
        """Start it. Raises: DoctorError if it fails or takes longer than start_seconds to its first answer."""
        folder.mkdir()
        self._is_job, self._folder, self._num_answers = num_ranks > 1, folder, 0
        write_new(folder / CONFIG, dump_config(config).encode())
        launch = ["launch", "local", "--ranks", str(num_ranks), "--"] if self._is_job else []
        argv = [*bigbatch_argv(), *launch, "doctor", "probe", str(folder), str(os.getpid())]
        self._process = ChildProcess(argv, log=folder / "output.txt", within=folder)
        try:
            self.facts: Mapping[str, Any] = self._answer(limit_seconds=start_seconds)
        except BaseException:
            self.kill()
            raise

    def ask(self, what: str, *, limit_seconds: float, **details: Any) -> dict[str, Any]:
        """Send an order and return the answer. Raises: DoctorError if it fails or takes longer than limit_seconds."""
        append(self._folder / ORDERS, {"what": what, **details})
        return self._answer(limit_seconds=limit_seconds)

    def close(self) -> None:
        """Ask the process to exit; kill it if it does not within END_SECONDS."""
        append(self._folder / ORDERS, {"what": "end"})
        deadline = time.monotonic() + END_SECONDS
        while self._process.exit_code() is None:
            if time.monotonic() > deadline:
                self.kill()
                return
            time.sleep(POLL_SECONDS)

    def kill(self) -> None:
        """End the process at once, with the ranks that a failed launcher has left."""
        # a launcher needs time to end its ranks; a single process has nothing to lose, and may be within a step
        if self._is_job:
            self._process.end()
        else:
            self._process.kill()

    def _answer(self, *, limit_seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + limit_seconds
        while len(found := read_lines(self._folder / ANSWERS)) <= self._num_answers:
            if self._process.exit_code() is not None:
                raise DoctorError(self._process.reason())
            if time.monotonic() > deadline:
                raise DoctorError(f"took longer than {limit_seconds:.0f} s, and was ended")
            time.sleep(POLL_SECONDS)
        self._num_answers += 1
        return found[self._num_answers - 1]


@dataclass(frozen=True)
class Turn:
    images_per_second: float
    peak_bytes: int


class Probes:
    """Opens probes of configs. All stay in memory between turns, until one fails by GPU_TAKEN but works alone.

    From then on each probe is started again and alone for its turn.
    """

    def __init__(self, start: Callable[[Mapping[str, Any]], ProbeChild], *, limit_seconds: Callable[[], float]) -> None:
        """start: values by dotted key -> a process (raises DoctorError). limit_seconds: returns an answer's limit."""
        self._start = start
        self._limit_seconds = limit_seconds
        self.part: Mapping[str, Any] = {}
        """Values that cut the step of every config opened from now on."""
        self.flushes = True
        """Whether each turn first uses up the batches that were prefetched during another probe's turn."""
        self._running: dict[Probe, ProbeChild] = {}
        self.is_alone = False

    def open(self, values: Mapping[str, Any], *, batches: str, seconds: float) -> "Probe":
        """Start measuring a config. Raises: DoctorError."""
        probe = Probe(self, values, batches=batches, seconds=seconds)
        self.ask(probe, "facts")
        return probe

    def ask(self, probe: "Probe", what: str, **details: Any) -> Mapping[str, Any]:
        """Send the probe an order; facts are those of its start. Raises: DoctorError, and the process is ended then."""
        try:
            return self._ask(probe, what, details)
        except DoctorError as error:
            if self.is_alone or not self._running or not any(words in str(error) for words in GPU_TAKEN):
                raise
        self.is_alone = True
        try:
            return self._ask(probe, what, details)
        except DoctorError:
            self.is_alone = False  # room for the others does not help this one
            raise

    def _ask(self, probe: "Probe", what: str, details: dict[str, Any]) -> Mapping[str, Any]:
        if probe not in self._running:
            if self.is_alone:
                for other in list(self._running):
                    self.close(other)
            self._running[probe] = self._start({**self.part, **probe.values})
        child = self._running[probe]
        try:
            return child.facts if what == "facts" else child.ask(what, limit_seconds=self._limit_seconds(), **details)
        except DoctorError:
            self._running.pop(probe).kill()
            raise

    def close(self, probe: "Probe") -> None:
        if probe in self._running:
            self._running.pop(probe).close()

    def kill_all(self) -> None:
        while self._running:
            self._running.popitem()[1].kill()


class Probe:
    """Measures one config in repeated turns."""

    def __init__(self, probes: Probes, values: Mapping[str, Any], *, batches: str, seconds: float) -> None:
        self.values = dict(values)
        self._probes, self._batches, self._seconds = probes, batches, seconds

    def ask(self, what: str, **details: Any) -> Mapping[str, Any]:
        """Ask the probe. Raises: DoctorError."""
        return self._probes.ask(self, what, **{"seconds": self._seconds, **details})

    def run(self) -> Turn:
        """Run some steps. Raises: DoctorError."""
        found = self.ask("steps", batches=self._batches, flushes=self._probes.flushes)
        return Turn(found["images"] / found["seconds"], found["peak_bytes"])

    def close(self) -> None:
        self._probes.close(self)


def orders(folder: Path, *, is_running: Callable[[], bool]) -> Iterator[dict[str, Any]]:
    """Yield the doctor's orders as they arrive, until is_running is false while none is waiting."""
    num_seen = 0
    while True:
        found = read_lines(folder / ORDERS)
        if num_seen < len(found):
            yield found[num_seen]
            num_seen += 1
        elif is_running():
            time.sleep(POLL_SECONDS)
        else:
            return


def append(path: Path, facts: dict[str, Any]) -> None:
    with open_to_append(path) as file:
        file.write((json.dumps(facts) + "\n").encode())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read whole lines: one may be half written."""
    text = read_plain(path).decode() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
