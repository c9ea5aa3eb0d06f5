"""The plot of a run: loss, accuracy and learning rate over its epochs."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bigbatch.colours import COLOURS, new_figure
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.words import has_numbers

TRAIN_COLOUR, EVAL_COLOUR = COLOURS[:2]


def plot_run(records: Sequence[dict[str, Any]], path: Path, **settings: Any) -> None:
    """Draw a run folder's plot. settings: as of draw_run(). Raises: RunFolderError."""
    RunDir(path.parent).save_plot(path, draw_run(records, **settings))


def draw_run(
    records: Sequence[dict[str, Any]],
    *,
    title: str,
    label_smoothing: float,
    loss: str = "cross-entropy (nats)",
    global_batch_size: int | None = None,
    schedule: Callable[[int], float] | None = None,
) -> Figure:
    """Draw loss, accuracy and learning rate over epochs, in one colour each for training and evaluation.

    Also the noise scale, if it was measured, beside the global batch. label_smoothing: of the training loss.
    schedule: learning rate by step, drawn for every step if all records agree with it: a peak may lie between reports.
    """
    train = [r for r in records if r["kind"] == "train" and has_numbers(r, "step", "epoch", "loss", "lr")]
    evals = [r for r in records if r["kind"] == "eval" and has_numbers(r, "epoch", "top1")]
    noisy = [r for r in train if has_numbers(r, "noise_scale", "noise_scale_low")]
    count = 4 if noisy else 3
    figure, panels = new_figure(13 * count / 3, 4.4, num_panels=count)
    loss_axes, accuracy_axes, rate_axes, *noise_axes = panels
    smoothed = f" (raised by label smoothing of {label_smoothing:g})" if label_smoothing else ""
    lines = [
        (loss_axes, train, "loss", 1, "-", TRAIN_COLOUR, f"training{smoothed}"),
        (loss_axes, [r for r in evals if has_numbers(r, "loss")], "loss", 1, "o-", EVAL_COLOUR, "evaluation"),
        (accuracy_axes, evals, "top1", 100, "o-", EVAL_COLOUR, "top-1"),
        (rate_axes, _every_rate(train, schedule), "lr", 1, "-", TRAIN_COLOUR, None),
    ]
    of_five = [r for r in evals if has_numbers(r, "top5")]
    if any(r["top5"] < 1 for r in of_five):  # with at most five classes it is always 1
        lines.append((accuracy_axes, of_five, "top5", 100, "s--", EVAL_COLOUR, "top-5"))
    for axes, rows, key, scale, style, color, label in lines:
        epochs, values = [r["epoch"] for r in rows], [scale * r[key] for r in rows]
        if rows:
            seen = style if len(rows) > 1 else style.strip("-") or "o"  # a line needs two points
            axes.plot(epochs, values, seen, color=color, markersize=5, label=label, clip_on=False)
    loss_axes.set(ylabel=loss, title="Loss")
    accuracy_axes.set(ylabel="correct (%)", title="Accuracy, evaluation", ylim=(0, 100))
    rate_axes.set(ylabel="learning rate", title="Learning rate", ylim=(0, None))
    for axes in noise_axes:
        _draw_noise_scale(axes, noisy, global_batch_size=global_batch_size)
    last = max((r["epoch"] for r in (*train, *evals)), default=1)
    for axes in panels:
        axes.set(xlabel="epoch", xlim=(0, last))
        axes.locator_params(axis="x", nbins=7, integer=last >= 2)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (loss_axes, accuracy_axes, *noise_axes):
        if axes.get_lines():
            # below the panel, outside of the curves
            axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=9)
    figure.suptitle(title, fontsize=13)
    return figure


def _every_rate(train: Sequence[dict[str, Any]], schedule: Callable[[int], float] | None) -> Sequence[dict[str, Any]]:
    """Return epoch and rate of every step by the schedule; the records themselves if one of them has another rate."""
    if schedule is None or not all(math.isclose(schedule(r["step"] - 1), r["lr"], rel_tol=1e-9) for r in train):
        return train
    return [
        {"epoch": train[-1]["epoch"] * done / train[-1]["step"], "lr": schedule(done - 1)}
        for done in range(1, train[-1]["step"] + 1 if train else 1)
    ]


def _draw_noise_scale(axes: Axes, rows: Sequence[dict[str, Any]], *, global_batch_size: int | None) -> None:
    """Draw the running noise scale with its band, which reaches the top if it has no upper bound."""
    epochs, values = [r["epoch"] for r in rows], [max(1.0, r["noise_scale"]) for r in rows]
    seen = "-" if len(rows) > 1 else "o"
    axes.plot(epochs, values, seen, color=TRAIN_COLOUR, markersize=5, label="noise scale, 95% band", clip_on=False)
    if global_batch_size is not None:
        axes.axhline(global_batch_size, color="0.4", linestyle="--", linewidth=1, label="global batch")
    axes.set(yscale="log", ylabel="images", title="Noise scale")
    low, high = axes.get_ylim()
    axes.fill_between(
        epochs,
        [max(low, r["noise_scale_low"]) for r in rows],
        [min(10 * high, r["noise_scale_high"]) if has_numbers(r, "noise_scale_high") else 10 * high for r in rows],
        color=TRAIN_COLOUR,
        alpha=0.2,
        linewidth=0,
    )
    axes.set_ylim(low / 2, 2 * high)
