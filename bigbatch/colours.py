"""Frame of every plot, and colours in the order of its curves: Okabe and Ito's, for colour-blind readers."""

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def new_figure(width: float, height: float, *, num_panels: int = 1, **shared: Any) -> "tuple[Figure, Any]":
    """Return a figure, and its panels in a row, each with a grid. shared: as for matplotlib's subplots."""
    from matplotlib.figure import Figure  # takes long to import

    figure = Figure(figsize=(width, height), layout="constrained")
    panels = figure.subplots(1, num_panels, squeeze=False, **shared)[0]
    for panel in panels:
        panel.grid(alpha=0.3)
    return figure, panels


def ignore_missing_glyphs() -> None:
    """Let matplotlib draw a box for a character that its font lacks, without a warning for each."""
    warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from", UserWarning)
