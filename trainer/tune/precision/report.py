"""What a search for a precision shows and leaves: precision.json, tables and reasons in words, a picture."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bigbatch.colours import COLOURS
from bigbatch.errors import printable
from bigbatch.trainer.config.strict_yaml import as_yaml
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.tune.precision.choices import POWERS, Choice, Gradients, SpanRow, WireRow
from bigbatch.trainer.tune.precision.magnitudes import FP16_LEAST, FP16_WHOLE, Magnitudes
from bigbatch.trainer.tune.precision.steps import Tried

SHOWN_POWERS = 4
"""Loss scales lie so many doublings apart in the printed table, that of the choice beside them."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Holds what was measured and what to take."""

    precision: str
    num_steps: int
    num_ranks: int
    gradients: Gradients
    largest: tuple[float, ...]
    """Gradient of a weight, in each step."""
    losses: tuple[float, ...]
    """Of each step, in fp32."""
    spans: tuple[SpanRow, ...]
    wires: tuple[WireRow, ...]
    choices: Mapping[str, Choice]
    tried: Tried | None = None
    failure: str = ""
    """Why training with what is recommended failed."""

    @property
    def values(self) -> dict[str, Any]:
        """Return what to change, by dotted key."""
        return {key: value for choice in self.choices.values() for key, value in choice.values.items()}

    @property
    def scale_power(self) -> int | None:
        """Return the power of the loss scale that is recommended."""
        scale = self.values.get("optimizer.loss_scale")
        return None if scale is None else round(math.log2(scale))

    def record(self) -> dict[str, Any]:
        """Make what precision.json states."""
        return {
            "recommended": self.values,
            "reasons": {name: choice.reason for name, choice in self.choices.items()},
            "precision": self.precision,
            "steps": self.num_steps,
            "ranks": self.num_ranks,
            "loss_scales": [self.scale_record(power) for power in POWERS],
            "wires": [asdict(row) for row in self.wires],
            "ghost_batches": [asdict(row) for row in self.spans],
            "largest_gradient": list(self.largest),
            "loss_fp32": list(self.losses),
            "weights_by_power_of_two": _sorted(self.gradients.weights),
            "activations_by_power_of_two": _sorted(self.gradients.activations),
            "tried": None if self.tried is None else asdict(self.tried),
            "failure": self.failure,
        }

    def scale_record(self, power: int) -> dict[str, float]:
        """Say what fp16 loses at a scale of 2^power."""
        weights, activations = self.gradients.weights, self.gradients.activations
        return {
            "loss_scale": 2.0**power,
            "weights_lost": weights.lost(scale_power=power),
            "weights_shortened": weights.shortened(scale_power=power),
            "activations_lost": activations.lost(scale_power=power),
            "activations_shortened": activations.shortened(scale_power=power),
            "headroom_powers_of_two": self.gradients.headroom(power),
        }


def explain(answer: Answer) -> list[str]:
    """Say what each choice loses, what to take, and what training so showed."""
    lines = [*_scale_lines(answer), "", *_wire_lines(answer), "", *_span_lines(answer), ""]
    for name, choice in answer.choices.items():
        stated = " ".join(f"--{key} {as_yaml(value)}" for key, value in choice.values.items())
        lines.append(f"{name}: {stated or 'as it is'}")
        lines.append(f"  {choice.reason}")
    return [*lines, *_tried_lines(answer)]


def _scale_lines(answer: Answer) -> list[str]:
    shown = {*range(0, len(POWERS), SHOWN_POWERS), *([] if answer.scale_power is None else [answer.scale_power])}
    lines = [
        f"gradients of {answer.num_steps} steps in fp16, by loss scale; lost: below 2^{FP16_LEAST}, short: below "
        f"2^{FP16_WHOLE}, or 0",
        f"{'':>10}  {'of weights':>18}  {'of activations':>18}",
        f"{'scale':>10}  {'lost':>8}  {'short':>8}  {'lost':>8}  {'short':>8}  {'may grow':>14}",
    ]
    for power in sorted(shown):
        row = answer.scale_record(power)
        shares = (row[f"{kind}_{what}"] for kind in ("weights", "activations") for what in ("lost", "shortened"))
        mark = "  recommended" if power == answer.scale_power else ""
        lines.append(
            f"{row['loss_scale']:>10.0f}  {'  '.join(f'{share:>8.2%}' for share in shares)}  "
            f"{_growth(row['headroom_powers_of_two']):>14}{mark}"
        )
    return lines


def _wire_lines(answer: Answer) -> list[str]:
    lines = [
        f"a rank's term of {answer.num_ranks}, by wire (lost: becomes 0)",
        f"{'wire':>10}  {'predivide':>9}  {'bytes':>6}  {'lost':>7}  {'error':>8}  {'may grow':>14}",
    ]
    for row in answer.wires:
        grows = "as fp32" if row.headroom is None else _growth(row.headroom)
        lines.append(
            f"{row.wire_dtype or 'null':>10}  {row.predivide:>9.3g}  {row.num_bytes:>6.3g}  {row.lost:>7.2%}  "
            f"{row.error:>8.2e}  {grows:>14}"
        )
    return lines


def _span_lines(answer: Answer) -> list[str]:
    lines = [
        "the same steps by ghost batch, at that scale",
        f"{'bn_span':>10}  {'short':>7}  {'may grow':>14}  {'last loss':>9}",
    ]
    for row in answer.spans:
        lines.append(f"{row.bn_span:>10}  {row.short:>7.2%}  {_growth(row.headroom):>14}  {row.loss:>9.4f}")
    return lines


def _growth(headroom: float) -> str:
    """Say by what factor the largest may grow: two to that power, or more than fp32 holds."""
    return "overflows" if headroom < 0 else f"{2.0 ** min(headroom, 128.0):.3g} times"


def _tried_lines(answer: Answer) -> list[str]:
    if answer.failure:
        return [f"training so failed: {answer.failure}"]
    if answer.tried is None:
        return []
    tried = answer.tried
    count = len(tried.losses)
    text = (
        f"tried: {count} steps in {answer.precision}, {tried.overflow_steps} of which overflowed; mean loss "
        f"{fmean(tried.losses):.4f}, in fp32 {fmean(answer.losses[:count]):.4f}"
    )
    if not tried.underflow:
        return [text]
    return [f"{text}; summed gradients that are short {fmean(tried.underflow):.2%}"]


def plot_answer(answer: Answer, path: Path, *, title: str) -> None:
    """Plot how many values reach each power of two, and what fp16 loses at each scale, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.2), layout="constrained")
    sizes, scales = figure.subplots(1, 2)
    kinds = {"weights": answer.gradients.weights, "activations": answer.gradients.activations}
    for color, (name, found) in zip(COLOURS, kinds.items(), strict=False):
        counts = _sorted(found)
        total = max(1, found.nonzero)
        sizes.step([*counts], [count / total for count in counts.values()], where="post", color=color, label=name)
        lost = [found.lost(scale_power=power) for power in POWERS]
        short = [found.shortened(scale_power=power) for power in POWERS]
        scales.plot([*POWERS], short, "o-", markersize=3, color=color, label=f"{name}: short")
        scales.plot([*POWERS], lost, ":", color=color, label=f"{name}: lost")
    for power, label in ((FP16_LEAST, "fp16's smallest"), (FP16_WHOLE, "with all digits")):
        sizes.axvline(power, color="0.4", linestyle="--", linewidth=1)
        sizes.annotate(label, (power, 0.98), xycoords=("data", "axes fraction"), rotation=90, va="top", fontsize=7)
    if answer.scale_power is not None:
        scales.axvline(answer.scale_power, color="0.3", linestyle="--", linewidth=1, label="recommended")
    sizes.set(xlabel="power of two of a gradient", ylabel="share of the values")
    scales.set(xlabel="power of two of the loss scale", ylabel="share of the values in fp16")
    for axes in (sizes, scales):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.suptitle(printable(title), fontsize=11, parse_math=False)  # a path may have two dollar signs
    RunDir(path.parent).save_plot(path, figure)


def _sorted(found: Magnitudes) -> dict[int, int]:
    return dict(sorted(found.counts.items()))
