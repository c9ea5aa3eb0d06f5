"""Plots of an evaluation: the confusions of classes, and accuracy by confidence."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from bigbatch.colours import COLOURS
from bigbatch.errors import printable
from bigbatch.trainer.inference.answers import Answered
from bigbatch.words import percent

MAX_GRID = 25
"""Most classes whose whole confusion matrix is drawn; with more, that many of the largest confusions are."""
MAX_CHARACTERS = 30


def draw_confusion(answered: Answered, names: Sequence[str]) -> Figure:
    """Draw the confusion matrix as a grid, or the largest confusions of many classes as bars."""
    return _draw_grid(answered, names) if len(names) <= MAX_GRID else _draw_largest(answered, names)


def _draw_grid(answered: Answered, names: Sequence[str]) -> Figure:
    """Draw a cell for each pair of classes: its images, coloured by their share of the true class."""
    counts_KK = np.zeros((answered.num_classes, len(names)), np.int64)
    labels_P, predicted_P, counts_P = answered.pairs()
    counts_KK[labels_P, predicted_P] = counts_P
    shares_KK = counts_KK / np.maximum(1, counts_KK.sum(1, keepdims=True))
    side = 2.4 + 0.42 * max(5, len(names))
    figure = Figure(figsize=(side + 1.2, side), layout="constrained")
    axes = figure.subplots()
    drawn = axes.imshow(100 * shares_KK, cmap="Blues", vmin=0, vmax=100)
    for label, predicted in zip(labels_P.tolist(), predicted_P.tolist(), strict=True):
        color = "white" if shares_KK[label, predicted] > 0.5 else "black"
        axes.text(predicted, label, f"{counts_KK[label, predicted]}", ha="center", va="center", color=color, fontsize=8)
    ticks, shown = range(len(names)), [shorten(name) for name in names]
    axes.set_xticks(ticks, shown, rotation=45, ha="right", rotation_mode="anchor", parse_math=False)
    axes.set_yticks(ticks[: answered.num_classes], shown[: answered.num_classes], parse_math=False)
    axes.set(xlabel="predicted class", ylabel="true class", title="Confusion matrix: images")
    axes.spines[:].set_visible(False)
    figure.colorbar(drawn, ax=axes, label="share of the true class (%)", shrink=0.8)
    return figure


def _draw_largest(answered: Answered, names: Sequence[str]) -> Figure:
    pairs = [pair for pair in zip(*(column.tolist() for column in answered.pairs()), strict=True) if pair[0] != pair[1]]
    shown, images_K = pairs[:MAX_GRID], np.bincount(answered.labels_N, minlength=len(names))
    figure = Figure(figsize=(10, 1.6 + 0.3 * max(1, len(shown))), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(range(len(shown)), [number for *_, number in shown], color=COLOURS[0], height=0.7)
    axes.bar_label(bars, [f" {n} of {images_K[label]}" for label, _, n in shown], fontsize=8)
    labels = [
        f"{shorten(names[label])} \N{RIGHTWARDS ARROW} {shorten(names[predicted])}" for label, predicted, _ in shown
    ]
    axes.set_yticks(range(len(shown)), labels, fontsize=8, parse_math=False)
    axes.invert_yaxis()
    axes.margins(x=0.12, y=0.01)
    title = f"The {len(shown)} largest of {len(pairs)} confusions" if shown else "No image was taken for another class"
    axes.set(title=f"{title} (true class \N{RIGHTWARDS ARROW} predicted class)" if shown else title, xlabel="images")
    axes.locator_params(axis="x", integer=True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_reliability(calibration: dict[str, Any]) -> Figure:
    """Draw accuracy over mean confidence for each bin, beside equality, and the images of each bin below."""
    num_bins = calibration["bins"]
    centres_M = (np.arange(num_bins) + 0.5) / num_bins
    figure = Figure(figsize=(5.6, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    filled = [bin for bin in range(num_bins) if calibration["images"][bin]]
    accuracies = [100 * calibration["accuracy"][bin] for bin in filled]
    above.bar(100 * centres_M[filled], accuracies, 92 / num_bins, color=COLOURS[5], label="accuracy of the bin")
    confidences = [100 * calibration["confidence"][bin] for bin in filled]
    above.plot(confidences, accuracies, "o", color=COLOURS[0], markersize=5, label="at its mean confidence")
    above.plot([0, 100], [0, 100], "--", color="0.4", linewidth=1, label="calibrated")
    title = f"Calibration error (ECE) {percent(calibration['ece'])}, {num_bins} bins"
    above.set(ylabel="right (%)", ylim=(0, 102), title=title)
    figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    below.bar(100 * centres_M, calibration["images"], 92 / num_bins, color="0.6")
    below.set(xlabel="confidence (%)", ylabel="images", xlim=(0, 100))
    for axes in (above, below):
        axes.grid(alpha=0.25, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def shorten(name: str) -> str:
    """Return a class name in one line; a long one is shortened to its two ends."""
    name, half = printable(name), MAX_CHARACTERS // 2
    return name if len(name) <= MAX_CHARACTERS else f"{name[: half - 2]} ... {name[-half + 3 :]}"
