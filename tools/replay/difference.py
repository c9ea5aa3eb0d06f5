"""Describe the first difference of two runs and its likely cause."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigbatch.trainer.observe.digests import ACTIVATIONS, BEFORE_SUM, IMAGES, PLACE_LETTERS, STATE, SUMMED
from bigbatch.words import listed

OTHER_ORDER = "another order of the same images"
OTHER_CONTENT = "another way to decode, crop or change the same images, or other files under their names"
OTHER_IMAGES = "other images: another set of them, or another order over the epoch"
CAUSES = {
    IMAGES: "other images, another order of them, or another way to decode, crop or change them",
    ACTIVATIONS: "another kernel in this layer or before it, or another number of threads",
    BEFORE_SUM: "another kernel, another number of threads, or another loss",
    SUMMED: "another kernel, another number of threads, or another order of the sums over ranks",
    STATE: "another update of the same gradients: the optimizer, its rate, or a bit that flipped",
}
CAUSE_IN_SUMS = (
    "another order of the sums (ranks, algorithm, fusion plan), another wire, or a bit that flipped on its way"
)
"""Likely cause if gradients are equal before their sum but not after it."""


@dataclass(frozen=True)
class Difference:
    """First difference of two runs: step, phase, and the tensors of that phase (num_tensors in all) that differ."""

    step: int
    phase: str
    names: Sequence[str]
    num_tensors: int
    equal: Sequence[str] = ()
    """Earlier phases of the step, which both runs recorded and which are equal."""
    microbatches: Sequence[int] = ()
    """Microbatches in which a tensor differs, if the phase records them."""
    num_microbatches: int = 0
    ranks: tuple[Sequence[int], Sequence[int]] = ((), ())
    """For each run the ranks that computed these microbatches; none for a run of one rank."""
    places: "Places | None" = None
    """Places of images, if both runs state them."""

    def __str__(self) -> str:
        equal = f"{', '.join(self.equal)} are equal; " if self.equal else ""
        if self.phase == IMAGES:
            return f"step {self.step}: the images of the global batch differ{self.places or ''}"
        first = self.names[0] if self.phase == STATE else f"that of {self.names[0]}"
        count = f"{len(self.names)} of {self.num_tensors} {self.phase}"
        return f"step {self.step}: {equal}{count} differ, first {first}{self._where()}"

    def named(self, name: str) -> str:
        """Return the tensor's name, as "gradient of NAME" in the phases of gradients."""
        return f"gradient of {name}" if self.phase in (BEFORE_SUM, SUMMED) else name

    def _where(self) -> str:
        if not self.microbatches:
            return ""
        if len(self.microbatches) == self.num_microbatches:
            return f"; in all {self.num_microbatches} microbatches" if self.num_microbatches > 1 else ""
        plural = "es" if len(self.microbatches) > 1 else ""
        text = f"; in microbatch{plural} {listed(self.microbatches)} (of 0 to {self.num_microbatches - 1})"
        if not any(self.ranks):
            return text
        ours, theirs = (
            f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks)}" if ranks else "one rank" for ranks in self.ranks
        )
        both = ours if ours == theirs else f"{ours} in the first run, {theirs} in the second"
        return f"{text}, computed by {both}"

    @property
    def odd_rank(self) -> int | None:
        """Return the only rank with differing microbatches if it is the same one in both runs; else None."""
        ours, theirs = self.ranks
        is_partial = 0 < len(self.microbatches) < self.num_microbatches
        return ours[0] if is_partial and len(ours) == 1 and list(ours) == list(theirs) else None


@dataclass(frozen=True)
class Places:
    """Indices of the global batch at which the images of two runs differ."""

    odd: Sequence[int]
    num_places: int
    positions: tuple[Sequence[int], Sequence[int]]
    """For each run the positions in the split of the images at all places."""

    def __str__(self) -> str:
        first = self.odd[0]
        one, other = (positions[first] for positions in self.positions)
        what = f"image {one} of the split in both" if one == other else f"images {one} and {other} of the split"
        return f" at {len(self.odd)} of {self.num_places} indices, first at index {first}: {what}"

    @property
    def cause(self) -> str:
        ours, theirs = self.positions
        if all(ours[place] == theirs[place] for place in self.odd):
            return OTHER_CONTENT
        return OTHER_ORDER if sorted(ours) == sorted(theirs) else OTHER_IMAGES


def find_places(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Places | None:
    """Return the places at which images differ; None if none does, or the runs recorded different numbers of images."""
    positions = ours.get("positions", []), theirs.get("positions", [])
    count = len(positions[0])
    if count != len(positions[1]):
        return None
    words = [
        [run.get("places", "")[k : k + PLACE_LETTERS] for k in range(0, count * PLACE_LETTERS, PLACE_LETTERS)]
        for run in (ours, theirs)
    ]
    odd = [place for place, (one, other) in enumerate(zip(*words, strict=True)) if one != other]
    return Places(odd, count, positions) if odd else None


def likely_cause(difference: Difference, differing: Sequence[str], *, is_step_before_equal: bool) -> str:
    """Return the likely cause of the difference. differing: config keys and job facts that differ between the runs."""
    cause = difference.places.cause if difference.places else CAUSES[difference.phase]
    if difference.phase == SUMMED and BEFORE_SUM in difference.equal:
        cause = CAUSE_IN_SUMS
    elif difference.phase not in (IMAGES, STATE) and not is_step_before_equal:
        before = (
            f"before it, because nothing is compared of step {difference.step - 1}"
            if difference.step > 1
            else "to begin with"
        )
        cause += f", or other weights {before}"
    if difference.odd_rank is not None:
        cause = (
            f"rank {difference.odd_rank} computes other values from the same images: a bit that flipped in its "
            f"weights, its processor, its memory; else {cause}"
        )
    if differing:
        return f"{cause}; the differences are listed above: {', '.join(differing)}"
    is_told_by_one = difference.phase != ACTIVATIONS and difference.odd_rank is None  # the last layer may differ alone
    if is_told_by_one and len(difference.names) == 1 and difference.num_tensors > 1:
        return f"a bit that flipped, because only one tensor differs, and config and job are the same; else {cause}"
    return f"{cause}; config and job are the same, so the result may change from run to run, or between machines"
