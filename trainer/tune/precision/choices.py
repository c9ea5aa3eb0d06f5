"""Which loss scale, which wire and which ghost batch to take: pure functions of what a few steps have shown.

The underflow share is the signal: of all values, those that fp16 holds as 0 or without all digits. The smallest scale
at which about as few are short as at any leaves the most room for gradients that grow.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigbatch.trainer.tune.precision.magnitudes import Magnitudes

POWERS = range(25)
"""Of the loss scales that a config may state: 1 to 2^24."""
WIRE_POWERS = (0, *(sign * power for power in range(1, 25) for sign in (1, -1)))
"""Of 1 / comm.predivide, the mildest first."""
TOLERANCE = 0.001
"""Share of the values by which a choice may lose more than the best one."""
LEAST_HEADROOM = 3.0
"""Powers of two that gradients may grow by before they overflow."""
SAFE_HEADROOM = 8.0
"""With so many a scale may stay as it is: a warm-up and a fall of the loss change gradients by less."""
SPAN_GAIN = 0.9
"""Of what is short, that another ghost batch may leave at most: seeds alone make 2% of it, and the update changes."""


@dataclass(frozen=True)
class Gradients:
    """Holds what some steps have shown: summed gradients of half-precision weights, and those of activations."""

    weights: Magnitudes
    activations: Magnitudes

    def shares(self, power: int) -> list[float]:
        """Return of each the share that is without all digits at a scale of 2^power."""
        return [each.shortened(scale_power=power) for each in (self.weights, self.activations)]

    def short(self, power: int) -> float:
        """Return the larger of both shares."""
        return max(self.shares(power))

    def headroom(self, power: int) -> float:
        """Return the smaller of both headrooms, in powers of two."""
        return min(each.headroom(scale_power=power) for each in (self.weights, self.activations))


@dataclass(frozen=True)
class Choice:
    """Names values by dotted key, with the reason."""

    values: Mapping[str, Any]
    reason: str


def choose_scale(found: Gradients) -> tuple[int | None, str]:
    """Return the power of the loss scale to begin with and the reason; None where fp16 holds these at no scale."""
    power = _mildest(POWERS, short=found.shares, headroom=found.headroom)
    if power is None:
        return None, "gradients overflow fp16 at every loss scale: take optimizer.precision bf16 or fp32"
    reason = (
        f"the smallest scale at which at most {TOLERANCE:.1%} more of either are short than at any "
        f"({found.short(power):.2%} at most); "
        f"the largest may grow {2 ** found.headroom(power):.3g} times before it overflows"
    )
    return power, reason


def is_static(found: Gradients, power: int) -> bool:
    """Tell whether the scale may stay as it is for a whole run."""
    return found.headroom(power) >= SAFE_HEADROOM


def scale_choice(found: Gradients, *, growth_steps: int | None) -> Choice:
    """Choose the loss scale, static or not. growth_steps: of one that changes, as the config has it."""
    power, reason = choose_scale(found)
    if power is None:
        return Choice({}, reason)
    static = is_static(found, power)
    kept = "so it may stay as it is" if static else "which may not be enough for a whole run, so it changes"
    values = {
        "optimizer.loss_scale": 2.0**power,
        "optimizer.loss_scale_growth_steps": None if static else (growth_steps or 2000),
    }
    return Choice(values, f"{reason}, {kept}")


@dataclass(frozen=True)
class WireRow:
    """Says what a wire does to the gradients of a step."""

    wire_dtype: str | None
    predivide: float
    num_bytes: float
    """Of each value."""
    lost: float
    """Share of nonzero values that it makes 0."""
    error: float
    """L2 norm of what it changes, of that of the gradient."""
    headroom: float | None
    """Powers of two up to overflow; None where it has the range of fp32."""


def choose_predivide(weights: Magnitudes, *, num_ranks: int, scale_power: int = 0) -> float:
    """Return the divisor nearest to 1 with which about as few of the ranks' terms are short in fp16 as with any.

    The sum must have room. scale_power: of the loss scale, by which gradients are multiplied as they travel.
    """
    term_power = (num_ranks - 1).bit_length()

    def short(power: int) -> list[float]:
        return [weights.shortened(scale_power=scale_power + power - term_power)]

    def headroom(power: int) -> float:
        return weights.headroom(scale_power=scale_power + power)

    power = _mildest(WIRE_POWERS, short=short, headroom=headroom)
    return 1.0 if power is None else 2.0**-power


def wire_choice(rows: Sequence[WireRow], *, num_ranks: int) -> Choice:
    """Choose among what halves the bytes: the least error of those that lose few and do not overflow."""
    fitting = [
        row
        for row in rows
        if row.num_bytes == 2 and row.lost <= TOLERANCE and (row.headroom is None or row.headroom >= LEAST_HEADROOM)
    ]
    if num_ranks == 1:
        return Choice({}, "one rank sends nothing: give --num-ranks to choose for a job of so many")
    if not fitting:
        return Choice({}, f"each narrower wire loses more than {TOLERANCE:.1%} of the values, or may overflow")
    best = min(fitting, key=lambda row: row.error)
    values = {"comm.wire_dtype": best.wire_dtype, "comm.predivide": best.predivide}
    return Choice(
        values, f"half the bytes, at the least error ({best.error:.2e} of the gradient) of those that lose few"
    )


@dataclass(frozen=True)
class SpanRow:
    """Says what a ghost batch of so many pictures makes of the same steps."""

    bn_span: int
    short: float
    headroom: float
    loss: float
    """Of the last step, in fp32."""


def span_choice(rows: Sequence[SpanRow], *, own: int) -> Choice:
    """Choose another ghost batch only where clearly fewer are short than with the config's own."""
    mine = next(row for row in rows if row.bn_span == own)
    best = min(rows, key=lambda row: row.short)
    if best.short > min(SPAN_GAIN * mine.short, mine.short - TOLERANCE):
        return Choice({}, f"with no other are clearly fewer short than with {own}: {best.short:.2%} at best")
    return Choice(
        {"batch.bn_span": best.bn_span},
        f"{best.short:.2%} are short beside {mine.short:.2%}; it changes the update, so verify the accuracy",
    )


def _mildest(
    powers: Sequence[int], *, short: Callable[[int], Sequence[float]], headroom: Callable[[int], float]
) -> int | None:
    """Return the first power, of those with room, at which about as few of each kind are short as at any of them.

    Each kind by itself: activations of which half are 0 at any power say nothing of weights. Both shares fall as the
    scale rises, so there is such a power.
    """
    fitting = {power: short(power) for power in powers if headroom(power) >= LEAST_HEADROOM}
    least = [min(shares) for shares in zip(*fitting.values(), strict=True)]
    return next(
        (
            power
            for power, shares in fitting.items()
            if all(share <= fewest + TOLERANCE for share, fewest in zip(shares, least, strict=True))
        ),
        None,
    )
