"""`--max-megapixels`: for commands that decode images before there is an experiment."""

import argparse

from bigbatch.trainer.config.fields import MEGAPIXELS
from bigbatch.trainer.config.sections import DataConfig


def add_max_megapixels(parser: argparse.ArgumentParser) -> None:
    """Add the option to a command; arguments.max_megapixels is a number."""
    parser.add_argument(
        "--max-megapixels",
        type=_megapixels,
        default=DataConfig.max_megapixels,
        metavar="N",
        help="an image of more million pixels is bad and not decoded; a run has data.max_megapixels "
        "(default: %(default)s)",
    )


def _megapixels(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not MEGAPIXELS.holds(number):
        raise argparse.ArgumentTypeError(f"{text} is not possible; give a number {MEGAPIXELS.legal}")
    return number
