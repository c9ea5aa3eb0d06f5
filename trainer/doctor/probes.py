"""Configs that the doctor measures, each in its own processes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bigbatch.errors import DoctorError
from bigbatch.trainer.doctor.exchange import Child

NO_ROOM = ("OutOfMemoryError", "busy or unavailable")
"""Words in a GPU error that another process causes."""


@dataclass(frozen=True)
class Turn:
    images_per_second: float
    peak_bytes: int


class Probes:
    """Opens probes of configs. All stay in memory between turns, until one fails together with others but works alone.

    From then on each probe is started again and alone for its turn.
    """

    def __init__(self, start: Callable[[Mapping[str, Any]], Child], *, limit_seconds: Callable[[], float]) -> None:
        """start: values by dotted key -> a process (raises DoctorError). limit_seconds: returns an answer's limit."""
        self._start = start
        self._limit_seconds = limit_seconds
        self.part: Mapping[str, Any] = {}
        """Values that cut the step of every config opened from now on."""
        self.flushes = True
        """Whether each turn first uses up what was prefetched during another probe's turn."""
        self._running: dict[Probe, Child] = {}
        self.is_alone = False

    def open(self, values: Mapping[str, Any], *, batches: str, seconds: float) -> "Probe":
        """Start measuring a config. Raises: DoctorError."""
        probe = Probe(self, values, batches=batches, seconds=seconds)
        self.ask(probe, "facts")
        return probe

    def ask(self, probe: "Probe", what: str, **details: Any) -> Mapping[str, Any]:
        """Ask the probe; facts are those that it found as it started. Raises: DoctorError; what failed is ended."""
        try:
            return self._ask(probe, what, details)
        except DoctorError as error:
            if self.is_alone or not self._running or not any(words in str(error) for words in NO_ROOM):
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
