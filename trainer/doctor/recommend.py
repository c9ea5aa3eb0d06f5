"""Select speedups: measure each one beside the best so far, in alternating turns; its gain must exceed the noise."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Protocol

from bigbatch.errors import DoctorError
from bigbatch.trainer.doctor.candidates import Candidate


@dataclass(frozen=True)
class Turn:
    """Figures of some steps, timed together."""

    images_per_second: float
    peak_bytes: int


class Contestant(Protocol):
    """Measures one config in repeated turns."""

    def run(self) -> Turn:
        """Run one turn. Raises: DoctorError."""
        ...

    def close(self) -> None:
        """End its measurement."""
        ...


Open = Callable[[Mapping[str, Any]], Contestant]
"""values by dotted key -> the config with them. Raises: DoctorError."""


@dataclass(frozen=True)
class Comparison:
    """Compares two configs in alternating turns, so that a disturbance of the machine affects both."""

    base_images_per_second: float
    images_per_second: float
    gain: float
    """Median over turns of the second config's gain in rate, as a fraction."""
    spread: float
    """Half of the distance from the smallest to the largest gain."""
    turns: int
    peak_bytes: int

    def is_worth(self, *, noise: float) -> bool:
        """Tell whether the gain exceeds the spread of turns and the noise between equal configs."""
        return self.gain > max(self.spread, noise)


@dataclass(frozen=True)
class Row:
    """Result for a candidate."""

    candidate: Candidate
    measured: Comparison | None
    failure: str = ""
    is_taken: bool = False
    before: Mapping[str, Any] = field(default_factory=dict)
    """Speedups that were taken before it was tried."""


def compare(base: Contestant, other: Contestant, *, turns: int) -> Comparison:
    """Give both equally many turns, and the first turn equally often. Raises: DoctorError."""
    pairs = []
    for turn in range(turns):
        # turns about, so that a machine that grows slower favours neither
        first, second = (base, other) if turn % 2 == 0 else (other, base)
        one, two = first.run(), second.run()
        pairs.append((one, two) if first is base else (two, one))
    gains = [b.images_per_second / a.images_per_second - 1 for a, b in pairs]
    return Comparison(
        base_images_per_second=median(a.images_per_second for a, _ in pairs),
        images_per_second=median(b.images_per_second for _, b in pairs),
        gain=median(gains),
        spread=(max(gains) - min(gains)) / 2,
        turns=turns,
        peak_bytes=max(b.peak_bytes for _, b in pairs),
    )


def measure_noise(base: Contestant, start: Open, *, turns: int) -> Comparison:
    """Measure the config beside itself: another process, with memory and threads of its own. Raises: DoctorError."""
    again = start({})
    try:
        return compare(base, again, turns=turns)
    finally:
        again.close()


def noise_of(comparison: Comparison) -> float:
    """Return the fraction by which equal configs differ."""
    return max(abs(comparison.gain), comparison.spread)


class Greedy:
    """Tries candidates in order, each on top of those taken so far. It closes the probes that it starts."""

    def __init__(self, base: Contestant, start: Open, *, turns: int, noise: float) -> None:
        self._base, self._start, self._turns, self._noise = base, start, turns, noise
        self._best = base
        self.taken: dict[str, Any] = {}
        self._tried: list[dict[str, Any]] = [{}]

    def is_new(self, candidate: Candidate) -> bool:
        """Tell whether it gives, with those taken so far, a config that was not tried yet."""
        return {**self.taken, **candidate.values} not in self._tried

    def consider(self, candidate: Candidate) -> Row:
        """Measure a candidate, and take it if it is worth it; one that fails is left out."""
        row = Row(candidate, None, before=dict(self.taken))
        self._tried.append({**self.taken, **candidate.values})
        try:
            other = self._start({**self.taken, **candidate.values})
        except DoctorError as error:
            return replace(row, failure=str(error))
        try:
            row = replace(row, measured=(measured := compare(self._best, other, turns=self._turns)))
        except DoctorError as error:
            other.close()
            return replace(row, failure=str(error))
        if not measured.is_worth(noise=self._noise):
            other.close()
            return row
        if self._best is not self._base:
            self._best.close()
        self._best = other
        self.taken |= candidate.values
        return replace(row, is_taken=True)

    def verify(self) -> Comparison | None:
        """Compare all taken speedups with the unchanged config; None if none was taken, or one of the two fails."""
        if not self.taken:
            return None
        try:
            return compare(self._base, self._best, turns=self._turns)
        except DoctorError:
            return None


def advice(taken: Mapping[str, Any], verified: Comparison | None, *, noise: float) -> Mapping[str, Any]:
    """Return the values to change: all taken speedups, if together they beat the unchanged config."""
    return taken if verified is not None and verified.is_worth(noise=noise) else {}
