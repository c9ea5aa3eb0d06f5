"""Output of a batch recommendation: batch.json, the answer in words, and a plot."""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from bigbatch.colours import COLOURS, new_figure
from bigbatch.errors import printable
from bigbatch.experiments.batch.critical import (
    BatchCost,
    Pair,
    batch_costs,
    critical_batch,
    is_in_doubt,
    rate_factor,
    recommended,
    segments,
    thirds,
)
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.trainer.report.noise_scale import NoiseScale, describe_noise_scale


@dataclass(frozen=True)
class Answer:
    """A run's measurements, which are enough for a figure, and the batch that they recommend."""

    pairs: Sequence[Pair]
    run: Path
    global_batch_size: int
    microbatch_size: int
    num_train: int | None = None
    """Images of the training set; None if the run has not recorded them."""

    @cached_property
    def critical(self) -> NoiseScale:
        return critical_batch(segments(self.pairs), global_batch_size=self.global_batch_size)

    @cached_property
    def thirds(self) -> list[NoiseScale]:
        return thirds(self.pairs, global_batch_size=self.global_batch_size)

    @property
    def recommended(self) -> int | None:
        """Return the global batch to take; None if the noise hides the signal."""
        estimate = self.critical.estimate
        if estimate is None:
            return None
        return recommended(estimate, microbatch_size=self.microbatch_size, num_train=self.num_train)

    @property
    def rows(self) -> list[BatchCost]:
        estimate, own = self.critical.estimate, self.global_batch_size
        if estimate is None:
            return []
        return batch_costs(estimate, microbatch_size=self.microbatch_size, own=own, num_train=self.num_train)

    @property
    def rate_factor(self) -> float | None:
        """Return the factor by which SGD's best rate changes with the recommended batch."""
        if self.critical.estimate is None or self.recommended is None:
            return None
        return rate_factor(self.critical.estimate, old=self.global_batch_size, new=self.recommended)

    def record(self) -> dict[str, Any]:
        return {
            "critical_batch": self.critical.estimate,
            "critical_batch_low": self.critical.low,
            "critical_batch_high": self.critical.high,
            "in_doubt": is_in_doubt(self.critical),
            "recommended_batch": self.recommended,
            "training_images": self.num_train,
            "sgd_rate_factor": self.rate_factor,
            "batches": [asdict(row) for row in self.rows],
            "noise_scale_by_third": [each.record() for each in self.thirds],
            "measurements": len(self.pairs),
            "run": str(self.run),
            "global_batch_size": self.global_batch_size,
            "microbatch_size": self.microbatch_size,
        }


def explain(answer: Answer) -> Iterator[str]:
    """Yield lines that say which batch to take, what it costs, and how certain that is."""
    best, own = answer.recommended, answer.global_batch_size
    yield (
        f"critical batch {describe_noise_scale(answer.critical.record())} images, of {len(answer.pairs)} "
        f"measurements at a global batch of {own}"
    )
    if answer.thirds:
        thirds = zip(("early", "in the middle", "late"), answer.thirds, strict=False)
        yield "noise scale " + "; ".join(f"{when} {describe_noise_scale(each.record())}" for when, each in thirds)
    if best is not None:
        yield (
            f"recommended: a global batch of {best}, --batch.global_batch_size {best}; a larger one trades images for "
            "fewer steps (time), a smaller one steps for fewer images (compute):"
        )
        if best != recommended(answer.critical.estimate or 0.0, microbatch_size=answer.microbatch_size):
            yield (
                f"no batch is larger than the training set of {answer.num_train} images, so this is the largest that "
                "fits"
            )
        named = {own: "this run's"} | {best: "recommended" if best != own else "recommended, and this run's"}
        yield f"  {'batch':>9}  {'steps':>7}  {'images':>7}"
        for row in answer.rows:
            mark = f"  {named[row.global_batch_size]}" if row.global_batch_size in named else ""
            yield f"  {row.global_batch_size:>9}  {row.steps:>6.2f}x  {row.images:>6.2f}x{mark}"
        yield "  x: the fewest steps, or images, with which any batch comes to the same loss"
        if best != own:
            yield (
                f"the rate that suits it is {answer.rate_factor:.2f} times this run's for SGD; with another optimizer, "
                "search around that"
            )
    if best is None or is_in_doubt(answer.critical):
        again = shlex.join(["bigbatch", "tune", "batch", str(answer.run), "--epochs", "N", "--out", "FOLDER"])
        yield (
            "in doubt, as the band is wide: measure more steps, or at a larger batch: "
            f"{again} --batch.global_batch_size B"
        )


def plot_answer(answer: Answer, path: Path) -> None:
    """Plot steps and images over the batch, relative to the fewest, with the critical batch's band, as a PNG."""
    figure, (axes,) = new_figure(7, 4.2)
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
    axes.legend(fontsize=8)
    RunDir(path.parent).save_plot(path, figure)
