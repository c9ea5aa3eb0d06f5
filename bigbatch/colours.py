"""The colours of every plot, in the order of its curves: Okabe and Ito's, for colour-blind readers."""

import warnings

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def ignore_missing_glyphs() -> None:
    """Let matplotlib draw a box for a character that its font lacks, without a warning for each."""
    warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from", UserWarning)
