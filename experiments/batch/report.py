"""Output of a batch recommendation: batch.json, the answer in words, and a plot."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bigbatch.colours import COLOURS
from bigbatch.errors import printable
from bigbatch.experiments.batch.critical import (
    Pair,
    Row,
    critical_batch,
    is_in_doubt,
    rate_factor,
    recommended,
    segments,
    thirds,
    trade,
)
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.run.noise_scale import NoiseScale, describe_noise_scale


@dataclass(frozen=True)
class Answer:
    """A run's measurements and the batch that they recommend."""

    run: Path
    global_batch_size: int
    microbatch_size: int
    num_measurements: int
    critical: NoiseScale
    thirds: tuple[NoiseScale, ...]
    num_train: int | None = None
    """Images of the training set; None if the run has not recorded them."""

    @property
    def recommended(self) -> int | None:
        """Return the global batch to take; None if the noise hides the signal."""
        estimate = self.critical.estimate
        if estimate is None:
            return None
        return recommended(estimate, microbatch_size=self.microbatch_size, num_train=self.num_train)

    @property
    def is_capped(self) -> bool:
        """Tell whether the training set has fewer images than the recommended batch."""
        estimate = self.critical.estimate
        return estimate is not None and self.recommended != recommended(estimate, microbatch_size=self.microbatch_size)

    @property
    def rows(self) -> list[Row]:
        """Return the cost of the batches around it."""
        estimate = self.critical.estimate
        own, microbatch = self.global_batch_size, self.microbatch_size
        return (
            [] if estimate is None else trade(estimate, microbatch_size=microbatch, own=own, num_train=self.num_train)
        )

    @property
    def rate_factor(self) -> float | None:
        """Return the factor by which SGD's best rate changes with the recommended batch."""
        if self.critical.estimate is None or self.recommended is None:
            return None
        return rate_factor(self.critical.estimate, old=self.global_batch_size, new=self.recommended)

    def record(self) -> dict[str, Any]:
        """Return the content of batch.json."""
        low, high = self.critical.low, self.critical.high
        return {
            "critical_batch": self.critical.estimate,
            "critical_batch_low": low,
            "critical_batch_high": high,
            "in_doubt": is_in_doubt(self.critical),
            "recommended_batch": self.recommended,
            "training_images": self.num_train,
            "sgd_rate_factor": self.rate_factor,
            "batches": [asdict(row) for row in self.rows],
            "noise_scale_by_third": [each.record() for each in self.thirds],
            "measurements": self.num_measurements,
            "run": str(self.run),
            "global_batch_size": self.global_batch_size,
            "microbatch_size": self.microbatch_size,
        }


def make_answer(
    pairs: Sequence[Pair], *, run: Path, global_batch_size: int, microbatch_size: int, num_train: int | None = None
) -> Answer:
    """Compute the answer from a run's measurements, which must be enough for a figure."""
    critical = critical_batch(segments(pairs), global_batch_size=global_batch_size)
    course = thirds(pairs, global_batch_size=global_batch_size)
    return Answer(run, global_batch_size, microbatch_size, len(pairs), critical, tuple(course), num_train)


def explain(answer: Answer) -> list[str]:
    """Return lines that say which batch to take, what it costs, and how certain that is."""
    lines = [
        f"critical batch {describe_noise_scale(answer.critical.record())} images, of {answer.num_measurements} "
        f"measurements at a global batch of {answer.global_batch_size}"
    ]
    if answer.thirds:
        course = zip(("early", "in the middle", "late"), answer.thirds, strict=False)
        lines.append(
            "noise scale " + "; ".join(f"{when} {describe_noise_scale(each.record())}" for when, each in course)
        )
    if answer.recommended is None:
        return [*lines, _more(answer)]
    lines.append(
        f"recommended: a global batch of {answer.recommended}, --batch.global_batch_size {answer.recommended}; a "
        "larger one trades images for fewer steps (time), a smaller one steps for fewer images (compute):"
    )
    if answer.is_capped:
        lines.append(
            f"no batch is larger than the training set of {answer.num_train} images, so this is the largest that fits"
        )
    lines += [f"  {line}" for line in _table(answer)]
    if answer.recommended != answer.global_batch_size:
        lines.append(
            f"the rate that suits it is {answer.rate_factor:.2f} times this run's for SGD; with another optimizer, "
            "search around that"
        )
    return [*lines, _more(answer)] if is_in_doubt(answer.critical) else lines


def _table(answer: Answer) -> list[str]:
    named = {answer.recommended: "recommended", answer.global_batch_size: "this run's"}
    if answer.recommended == answer.global_batch_size:
        named = {answer.recommended: "recommended, and this run's"}
    lines = [f"{'batch':>9}  {'steps':>7}  {'images':>7}"]
    for row in answer.rows:
        mark = f"  {named[row.global_batch_size]}" if row.global_batch_size in named else ""
        lines.append(f"{row.global_batch_size:>9}  {row.steps:>6.2f}x  {row.images:>6.2f}x{mark}")
    return [*lines, "x: the fewest steps, or images, with which any batch comes to the same loss"]


def _more(answer: Answer) -> str:
    again = shlex.join(["bigbatch", "tune", "batch", str(answer.run), "--epochs", "N", "--out", "FOLDER"])
    why = "in doubt, as the band is wide: measure more steps, or at a larger batch"
    return f"{why}: {again} --batch.global_batch_size B"


def plot_answer(answer: Answer, path: Path) -> None:
    """Plot steps and images over the batch, beside the fewest of each, with the critical batch's band, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    batches = [row.global_batch_size for row in answer.rows]
    axes.plot(batches, [row.steps for row in answer.rows], "o-", color=COLOURS[0], label="steps")
    axes.plot(batches, [row.images for row in answer.rows], "s-", color=COLOURS[1], label="images")
    axes.set(xlabel="global batch", ylabel="times the fewest that there can be")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(batches)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    low, high = axes.get_xlim()
    band = (max(low, answer.critical.low), min(high, answer.critical.high or high))
    axes.axvspan(*band, color="0.85", label="critical batch, 95% band")
    if answer.recommended is not None:
        axes.axvline(answer.recommended, color="0.3", linestyle="--", linewidth=1, label="recommended")
    axes.set_xlim(low, high)
    # a path may have two dollar signs
    axes.set_title(printable(f"Steps against images: {answer.run}"), fontsize=11, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    RunDir(path.parent).save_plot(path, figure)
