"""The simulator's predictions for a sweep's points, as `bigbatch sweep --predict` recorded them in its folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bigbatch.errors import RunFolderError
from bigbatch.files import RECORD_BYTES, as_json, parse_json, read_plain
from bigbatch.trainer.folder.folder import RunDir
from bigbatch.words import is_number

NAME = "predicted.json"


@dataclass(frozen=True)
class PredictedRate:
    """Images per second of a point, with a 90% interval."""

    rate: float
    low: float
    high: float


def write_predictions(folder: Path, rates: Mapping[int, PredictedRate], *, cluster: str) -> None:
    """Record predictions by the point's number. Raises: RunFolderError."""
    points = {str(number): vars(each) for number, each in rates.items()}
    RunDir(folder).write_text(folder / NAME, as_json({"cluster": cluster, "points": points}, indent=1) + "\n")


def read_predictions(folder: Path) -> dict[int, PredictedRate]:
    """Read recorded predictions; empty if there are none. Raises: RunFolderError if they are damaged."""
    path = folder / NAME
    if not path.exists():
        return {}
    try:
        points = parse_json(read_plain(path, most=RECORD_BYTES))["points"]
        found = {int(number): PredictedRate(**each) for number, each in points.items()}
        if not all(
            number >= 0 and all(map(is_number, vars(each).values())) and 0 < each.low <= each.rate <= each.high
            for number, each in found.items()
        ):
            raise ValueError("rates that are not in order")
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        raise RunFolderError(f"{path} is not readable: remove it, and repeat the sweep with --predict") from error
    return found
