"""Select speedups: measure each one against the best so far, in alternating turns; its gain must exceed the noise."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from bigbatch.errors import DoctorError
from bigbatch.tools.doctor.exchange import Probe
from bigbatch.tools.doctor.speedups import Candidate


@dataclass(frozen=True)
class SpeedComparison:
    """Compares two configs in alternating turns, so that a disturbance of the machine affects both."""

    images_per_second: float
    gain: float
    """Median over turns of the second config's gain in rate, as a fraction."""
    spread: float
    """Half of the distance from the smallest to the largest gain."""
    turns: int
    peak_bytes: int

    @property
    def noise(self) -> float:
        """Return the noise, as a fraction, of a comparison of two equal configs."""
        return max(abs(self.gain), self.spread)

    def is_worth(self, *, noise: float) -> bool:
        """Return whether the gain exceeds the spread of turns and the noise between equal configs."""
        return self.gain > max(self.spread, noise)


@dataclass(frozen=True)
class TriedSpeedup:
    candidate: Candidate
    measured: SpeedComparison | None
    failure: str = ""
    is_taken: bool = False
    before: Mapping[str, Any] = field(default_factory=dict)
    """Values of the speedups that were taken before it was tried."""


def compare(base: Probe, other: Probe, *, turns: int) -> SpeedComparison:
    """Run both in the given number of turns, in alternating order. Raises: DoctorError."""
    pairs = []
    for turn in range(turns):
        # alternate which goes first, so that a slowing machine favours neither
        first, second = (base, other) if turn % 2 == 0 else (other, base)
        one, two = first.run(), second.run()
        pairs.append((one, two) if first is base else (two, one))
    gains = [b.images_per_second / a.images_per_second - 1 for a, b in pairs]
    return SpeedComparison(
        images_per_second=median(b.images_per_second for _, b in pairs),
        gain=median(gains),
        spread=(max(gains) - min(gains)) / 2,
        turns=turns,
        peak_bytes=max(b.peak_bytes for _, b in pairs),
    )


class Greedy:
    """Tries candidates in order, each on top of those taken so far. It closes the probes that it starts."""

    def __init__(self, base: Probe, start: Callable[[Mapping[str, Any]], Probe], *, turns: int, noise: float) -> None:
        """start: values by dotted key -> a probe of the config with them (raises DoctorError)."""
        self._base, self._start, self._turns, self._noise = base, start, turns, noise
        self._best = base
        self.taken: dict[str, Any] = {}
        self._tried: list[dict[str, Any]] = [{}]

    def is_new(self, candidate: Candidate) -> bool:
        """Return whether the candidate on top of the taken ones gives a config that was not tried yet."""
        return {**self.taken, **candidate.values} not in self._tried

    def consider(self, candidate: Candidate) -> TriedSpeedup:
        """Measure a candidate, and take it if its gain exceeds the noise; one that fails is not taken."""
        values = {**self.taken, **candidate.values}
        self._tried.append(values)
        row, other = TriedSpeedup(candidate, None, before=dict(self.taken)), None
        try:
            other = self._start(values)
            measured = compare(self._best, other, turns=self._turns)
            row = replace(row, measured=measured, is_taken=measured.is_worth(noise=self._noise))
            if row.is_taken:
                self._best, other, self.taken = other, self._best, values
        except DoctorError as error:
            row = replace(row, failure=str(error))
        if other is not None and other is not self._base:
            other.close()
        return row

    def verify(self) -> SpeedComparison | None:
        """Compare all taken speedups with the unchanged config; None if none was taken, or one of the two fails."""
        if not self.taken:
            return None
        try:
            return compare(self._base, self._best, turns=self._turns)
        except DoctorError:
            return None
