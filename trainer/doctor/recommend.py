"""Which speedups are worth taking: each is measured beside the best so far, turn by turn, and must beat the noise."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Protocol

from bigbatch.errors import DoctorError
from bigbatch.trainer.doctor.candidates import Candidate


@dataclass(frozen=True)
class Turn:
    """Holds the figures of some steps, timed together."""

    images_per_second: float
    peak_bytes: int


class Contestant(Protocol):
    """Measures a config, again and again."""

    def run(self) -> Turn:
        """Run one turn. Raises: DoctorError."""
        ...

    def close(self) -> None:
        """Close it: it is measured no more."""
        ...


Open = Callable[[Mapping[str, Any]], Contestant]
"""values by dotted key -> the config with them. Raises: DoctorError."""


@dataclass(frozen=True)
class Comparison:
    """Compares two configs, turn by turn: what disturbs the machine for a while disturbs both."""

    base_images_per_second: float
    images_per_second: float
    gain: float
    """Median over turns of how much faster the second one was, as a share."""
    spread: float
    """Half of the distance from the smallest to the largest gain."""
    turns: int
    peak_bytes: int

    def is_worth(self, *, noise: float) -> bool:
        """Tell whether it is faster, by more than turns differ, and by more than a config differs from itself."""
        return self.gain > max(self.spread, noise)


@dataclass(frozen=True)
class Row:
    """Says what became of a candidate."""

    candidate: Candidate
    measured: Comparison | None
    failure: str = ""
    is_taken: bool = False
    before: Mapping[str, Any] = field(default_factory=dict)
    """What was taken when its turn came."""


def compare(base: Contestant, other: Contestant, *, turns: int) -> Comparison:
    """Let each take as many turns, and begins as often. Raises: DoctorError."""
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
    """Compute the share by which equal configs differ."""
    return max(abs(comparison.gain), comparison.spread)


class Greedy:
    """Tries candidates one after the other, each on top of those that were taken. It closes what it starts."""

    def __init__(self, base: Contestant, start: Open, *, turns: int, noise: float) -> None:
        self._base, self._start, self._turns, self._noise = base, start, turns, noise
        self._best = base
        self.taken: dict[str, Any] = {}
        self._tried: list[dict[str, Any]] = [{}]

    def is_new(self, candidate: Candidate) -> bool:
        """Tell whether, beside what was taken, it is another config than all that were tried."""
        return {**self.taken, **candidate.values} not in self._tried

    def consider(self, candidate: Candidate) -> Row:
        """Measure it, and take it where it is worth it; one that fails is left out."""
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
        """Measure all that was taken beside the config as it was; None where nothing was, or one of them fails."""
        if not self.taken:
            return None
        try:
            return compare(self._base, self._best, turns=self._turns)
        except DoctorError:
            return None


def advice(taken: Mapping[str, Any], verified: Comparison | None, *, noise: float) -> Mapping[str, Any]:
    """Say what to change: all that was taken, unless together it does not beat the config as it was."""
    return taken if verified is not None and verified.is_worth(noise=noise) else {}
