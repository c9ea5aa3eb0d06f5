"""Output of a range test: range.json, the reading as text, a plot."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bigbatch.errors import printable
from bigbatch.trainer.run.folder import RunDir
from bigbatch.trainer.tune.range.curve import Suggestion, smooth


def range_record(lrs: Sequence[float], losses: Sequence[float], found: Suggestion, *, config: str) -> dict[str, Any]:
    """Return the content of range.json; losses in nats, one per step."""
    return {
        "suggested_lr": found.suggested_lr,
        "steepest_lr": found.steepest_lr,
        "exploded_lr": found.exploded_lr,
        "tenth_of_exploded_lr": found.tenth_lr,
        "lr": list(lrs),
        "loss": list(losses),
        "smoothed_loss": smooth(losses),
        "config": config,
    }


def explain(found: Suggestion, *, high: float, experiment: Sequence[str]) -> list[str]:
    """Return the reading and the next steps. experiment: the words that follow --config, with overrides."""
    if found.suggested_lr is None:
        return ["the loss never fell: raise --to, take more --steps, or look for an error in data and model"]
    lines = [f"steepest descent at a learning rate of {found.steepest_lr:.4g}"]
    if found.exploded_lr is None:
        lines.append(f"the loss did not explode up to {high:g}: raise --to to find the rate at which it does")
    else:
        lines.append(f"exploded at {found.exploded_lr:.4g}; a tenth of that is {found.tenth_lr:.4g}")
    limit = found.exploded_lr or high
    lines.append(f"suggested: {found.suggested_lr:.4g}; start a search from it:")
    space = f"schedule.base_lr=log:{found.suggested_lr / 4:.4g}:{limit:.4g}"
    config = shlex.join(experiment)
    lines.append(f"  bigbatch tune search --config {config} --space {space} --trials 12 --epochs 3 --study FOLDER")
    return lines


def plot_range(lrs: Sequence[float], losses: Sequence[float], found: Suggestion, path: Path, *, title: str) -> None:
    """Plot loss over the learning rate (log), raw and smoothed, with the readings as lines, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    axes.plot(lrs, losses, color="0.75", label="loss of a step")
    axes.plot(lrs, smooth(losses), color="#0072B2", label="running mean")
    for lr, color, label in (
        (found.steepest_lr, "#009E73", "steepest descent"),
        (found.tenth_lr, "#E69F00", "a tenth of the exploding rate"),
        (found.exploded_lr, "#D55E00", "exploded"),
    ):
        if lr is not None:
            axes.axvline(lr, color=color, linestyle="--", label=f"{label}: {lr:.4g}")
    axes.set(xscale="log", xlabel="learning rate", ylabel="cross-entropy (nats)")
    axes.set_title(printable(title), parse_math=False)  # a path may have two dollar signs
    first, low = losses[0], min(losses)
    room = max(first - low, abs(first) / 2)
    if max(losses) > first + room:  # an explosion is many times as high as the descent that is to be seen
        axes.set_ylim(low - room / 10, first + room)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    RunDir(path.parent).save_plot(path, figure)
