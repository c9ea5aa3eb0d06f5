"""Configs that the doctor measures, each in its own processes."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from bigbatch.errors import DoctorError
from bigbatch.trainer.doctor.recommend import Turn

T = TypeVar("T")

NO_ROOM = ("OutOfMemoryError", "busy or unavailable")
"""Words in a GPU error that another process causes."""


class Measuring(Protocol):
    """Asks a running probe, as child.Child does."""

    facts: Mapping[str, Any]

    def ask(self, what: str, *, limit_seconds: float, **details: Any) -> dict[str, Any]:
        """Ask the probe. Raises: DoctorError."""
        ...

    def close(self) -> None:
        """Let it leave."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class Probes:
    """Opens probes of configs. All stay in memory between turns until one fails beside others but works alone.

    From then on each probe is started anew and alone for its turn.
    """

    def __init__(self, start: Callable[[Mapping[str, Any]], Measuring], *, limit_seconds: Callable[[], float]) -> None:
        """start: values by dotted key -> a probe (raises DoctorError). limit_seconds: returns an answer's limit."""
        self._start = start
        self._limit_seconds = limit_seconds
        self.part: Mapping[str, Any] = {}
        """Values that cut the step of every config opened from now on."""
        self.flushes = True
        """Whether each turn first uses up what was prefetched during another probe's turn."""
        self._running: dict[Probe, Measuring] = {}
        self.is_alone = False

    def open(self, values: Mapping[str, Any], *, batches: str, seconds: float) -> "Probe":
        """Start measuring a config. Raises: DoctorError."""
        probe = Probe(self, values, batches=batches, seconds=seconds)
        self.facts(probe)
        return probe

    def facts(self, probe: "Probe") -> Mapping[str, Any]:
        """Ask for the machine's facts, as a probe finds it. Raises: DoctorError."""
        return self._with_room(probe, lambda process: process.facts)

    def ask(self, probe: "Probe", what: str, **details: Any) -> dict[str, Any]:
        """Ask the probe. Raises: DoctorError; what failed is ended."""
        return self._with_room(probe, lambda process: process.ask(what, limit_seconds=self._limit_seconds(), **details))

    def cut(self, probe: "Probe", part: Mapping[str, Any]) -> None:
        """Let this probe, and all opened from now on, measure a part of the step. Raises: DoctorError."""
        probe.ask("cut", values=dict(part))
        self.part = part

    def _with_room(self, probe: "Probe", act: Callable[[Measuring], T]) -> T:
        try:
            return self._act(probe, act)
        except DoctorError as error:
            if self.is_alone or not self._running or not any(words in str(error) for words in NO_ROOM):
                raise
        self.is_alone = True
        try:
            return self._act(probe, act)
        except DoctorError:
            self.is_alone = False  # room for the others does not help this one
            raise

    def _act(self, probe: "Probe", act: Callable[[Measuring], T]) -> T:
        if probe not in self._running:
            if self.is_alone:
                self._close_others()
            self._running[probe] = self._start({**self.part, **probe.values})
        try:
            return act(self._running[probe])
        except DoctorError:
            self.kill(probe)
            raise

    def _close_others(self) -> None:
        for other in list(self._running):
            self.close(other)

    def close(self, probe: "Probe") -> None:
        """Close the probe."""
        if probe in self._running:
            self._running.pop(probe).close()

    def kill(self, probe: "Probe") -> None:
        """End its processes at once."""
        if probe in self._running:
            self._running.pop(probe).kill()

    def kill_all(self) -> None:
        """Kill all running probes."""
        for probe in list(self._running):
            self.kill(probe)


class Probe:
    """Measures one config, as a Contestant."""

    def __init__(self, probes: Probes, values: Mapping[str, Any], *, batches: str, seconds: float) -> None:
        self.values = dict(values)
        self._probes, self._batches, self._seconds = probes, batches, seconds

    @property
    def facts(self) -> Mapping[str, Any]:
        """Ask for the machine's facts. Raises: DoctorError."""
        return self._probes.facts(self)

    def ask(self, what: str, **details: Any) -> dict[str, Any]:
        """Ask the probe. Raises: DoctorError."""
        return self._probes.ask(self, what, **{"seconds": self._seconds, **details})

    def run(self) -> Turn:
        """Run some steps. Raises: DoctorError."""
        found = self.ask("steps", batches=self._batches, flushes=self._probes.flushes)
        return Turn(found["images"] / found["seconds"], found["peak_bytes"])

    def close(self) -> None:
        """Take no more turns."""
        self._probes.close(self)
